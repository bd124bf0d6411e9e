// @ts-check
/** The family of a session: who was forked from whom, at which turn, and what pages they share. */
import { Failure, Loaded, State } from '../components/basics.js';
import { post, sessionPath } from '../core/api.js';
import { useBusy } from '../core/busy.js';
import { count, plural } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { navigate, sessionAddress } from '../core/router.js';
import { html, useState } from '../core/ui.js';

const THICKEST = 10;

/** @param {{session: any, version: number, readOnly: boolean}} props */
export function ForksPage({ session, version, readOnly }) {
  const family = useResource(sessionPath(session.id, '/family'), { version });
  return html`
    ${!readOnly && html`<${ForkForm} session=${session} />`}
    <h2>Family</h2>
    <${Loaded} resource=${family}>${(data) => html`
      <${Tree} data=${data} self=${session.id} />
      <p class="note">${data.members.length === 1 ? 'No session was forked from this one, and it is no fork itself. ' : 'The thicker an edge, the more tokens have common pages. '}
        ${data.complete ? `All ${plural(data.scanned, 'session')} were looked at.` : `${count(data.scanned)} sessions were looked at; there are more.`}</p>`}
    <//>`;
}

function Tree({ data, self }) {
  const children = Map.groupBy(data.members, (member) => member.parent ?? '');
  const known = new Set(data.members.map(({ id }) => id));
  const roots = data.members.filter(({ parent }) => parent === null || !known.has(parent));
  const most = Math.max(1, ...data.members.map((member) => member.shared_tokens));
  const branch = (member) => {
    const own = children.get(member.id) ?? [];
    const tokens = member.shared_tokens;
    return html`<li key=${member.id} class=${member.id === self ? 'self' : ''} style=${{ '--edge': `${Math.max(1, Math.round((THICKEST * tokens) / most))}px` }}>
      ${member.exists ? html`<a href=${sessionAddress(member.id, 'forks')} aria-current=${member.id === self ? 'true' : null}>${member.id}</a>` : html`<span>${member.id} (deleted)</span>`}
      ${' '}${member.exists && html`<${State} state=${member.state} />`}
      <span class="note"> ${member.exists ? `${plural(member.turns, 'turn')}, ${plural(member.length, 'token')}` : ''}
        ${member.turn !== null ? `, forked at turn ${member.turn}` : ''}
        ${tokens > 0 ? `, ${plural(tokens, 'token')} shared with it` : ''}</span>
      ${own.length > 0 && html`<ul>${own.map(branch)}</ul>`}
    </li>`;
  };
  return html`<ul class="family">${roots.map(branch)}</ul>`;
}

/**
 * Fork a session at the end of a turn, the last one for null, and go to the fork's memory.
 * @param {any} session
 * @param {number | null} turn
 */
export async function forkAt(session, turn) {
  const made = await post(sessionPath(session.id, '/fork'), { turn, queue: true });
  navigate(sessionAddress(made.id));
}

function ForkForm({ session }) {
  const [turn, setTurn] = useState('');
  const [busy, error, run] = useBusy();
  const fork = (/** @type {Event} */ event) => {
    event.preventDefault();
    return run(() => forkAt(session, turn === '' ? null : Number(turn)));
  };
  return html`<form class="panel" onSubmit=${fork}>
    <h2>Fork from here</h2>
    <${Failure} error=${error} />
    <div class="row">
      <label class="field">At the end of turn
        <input type="number" min="0" max=${session.turns} placeholder=${`${session.turns}, the last`} value=${turn} onInput=${(event) => setTurn(event.target.value)} />
      </label>
      <button type="submit" class="primary" disabled=${busy}>Fork</button>
    </div>
  </form>`;
}
