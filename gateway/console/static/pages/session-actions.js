// @ts-check
/** What can be done with a session as a whole: its log as a file, and its deletion. */
import { Dialog, Failure } from '../components/basics.js';
import { get, remove, sessionPath, toQuery } from '../core/api.js';
import { useBusy } from '../core/busy.js';
import { plural } from '../core/format.js';
import { BASE, navigate } from '../core/router.js';
import { html, useState } from '../core/ui.js';

const TURNS_AT_ONCE = 100;

/** @param {{session: any, readOnly: boolean}} props */
export function SessionActions({ session, readOnly }) {
  const [asked, setAsked] = useState(false);
  const [busy, error, run] = useBusy();
  const playground = `${BASE}/playground?session=${encodeURIComponent(session.id)}`;
  return html`<div class="actions">
      <button type="button" disabled=${busy} onClick=${() => run(() => download(session))}>Download the log</button>
      ${!readOnly && html`<a class="button" href=${playground}>Open in the playground</a>
        <button type="button" onClick=${() => setAsked(true)}>Delete</button>`}
    </div>
    <${Failure} error=${error} />
    ${asked && html`<${Deletion} session=${session} onClose=${() => setAsked(false)} />`}`;
}

function Deletion({ session, onClose }) {
  const [busy, error, run] = useBusy();
  const erase = async () => {
    await remove(sessionPath(session.id));
    navigate(`${BASE}/sessions`);
  };
  return html`<${Dialog} open title=${`Delete ${session.id}?`} onClose=${onClose}>
    <p>Its ${plural(session.turns, 'turn')} and its stored rows go for good, except rows that other sessions have too.</p>
    <${Failure} error=${error} />
    <div class="row">
      <button type="button" class="primary" disabled=${busy} onClick=${() => run(erase)}>Delete it</button>
      <button type="button" onClick=${onClose}>Keep it</button>
    </div>
  <//>`;
}

/** Save the session and all its turns, as the API has them, in a JSON file. */
async function download(session) {
  const turns = [];
  let after = /** @type {number | null} */ (0);
  while (after !== null) {
    const page = await get(sessionPath(session.id, `/turns${toQuery({ after, limit: TURNS_AT_ONCE })}`));
    turns.push(...page.turns);
    after = page.next_after;
  }
  const text = JSON.stringify({ session: await get(sessionPath(session.id)), turns }, null, 1);
  const address = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  const link = Object.assign(document.createElement('a'), { href: address, download: `${session.id}.json` });
  link.click();
  URL.revokeObjectURL(address);
}
