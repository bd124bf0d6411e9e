// @ts-check
/** Why a token is active or evicted: reason, layers and heads that hold it, score, repairs. */
import { Failure } from '../components/basics.js';
import { sessionPath } from '../core/api.js';
import { words } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { sessionAddress } from '../core/router.js';
import { html } from '../core/ui.js';
import { hasHead } from './tokens.js';

/** More cells than this are summed up by layer. */
const MOST_CELLS = 1024;

/**
 * @param {{session: string, position: number | null, version: unknown, onClose: () => void}} props
 */
export function Why({ session, position, version, onClose }) {
  const path = position === null ? null : sessionPath(session, `/memory/tokens?start=${position}&stop=${position + 1}`);
  const { data, error } = useResource(path, { version });
  if (position === null) {
    return html`<aside class="panel why" aria-label="Why"><h2>Why?</h2>
      <p class="note">Choose a token on the map or in the text to see who holds it, and why.</p></aside>`;
  }
  const token = data?.tokens[0];
  return html`<aside class="panel why" aria-label="Why" aria-live="polite">
    <div class="row middle"><h2>Token ${position}</h2>
      <button type="button" onClick=${onClose} aria-label="Close the explanation">Close</button></div>
    <${Failure} error=${error} />
    ${token ? html`<${Explanation} session=${session} token=${token} heads=${data.kv_heads} />`
      : data && html`<p class="note">The session has no such token.</p>`}
  </aside>`;
}

function Explanation({ session, token, heads }) {
  return html`
    <p><span class="token-text">${token.text}</span></p>
    <p><strong>${token.detail}</strong></p>
    <dl>
      <dt>reason</dt><dd><code>${token.reason}</code></dd>
      <dt>active rows</dt><dd>${token.rows} of ${token.rows_total}</dd>
      ${token.turn !== null && html`<dt>turn</dt>
        <dd><a href=${sessionAddress(session, 'turns', `?turn=${token.turn}`)}>${token.turn}</a>${token.side ? `, ${words(token.side)}` : ''}</dd>`}
      <dt>token id</dt><dd>${token.id}</dd>
      ${token.score !== null && html`<dt>score at eviction</dt><dd>${Number(token.score.toPrecision(4))}</dd>`}
      <dt>repairs</dt>
      <dd>${token.repairs.length
        ? token.repairs.map((number) => html`<a key=${number} href=${sessionAddress(session, 'repairs', `?repair=${number}`)}>repair ${number}</a> `)
        : 'none of those remembered brought it back'}</dd>
    </dl>
    <${Holders} token=${token} heads=${heads} />`;
}

/** Layers by heads: who holds the token. */
function Holders({ token, heads }) {
  const layers = token.held.map((mask, layer) => ({ mask, back: token.promoted[layer], layer }));
  if (layers.length * heads > MOST_CELLS) {
    return html`<table class="heads"><caption>Heads that hold it, by layer</caption><tbody>
      ${layers.map(({ mask, layer }) => {
        const held = Array.from({ length: heads }, (_, head) => hasHead(mask, head)).filter(Boolean).length;
        return html`<tr key=${layer}><th scope="row">layer ${layer}</th><td>${held} of ${heads}</td></tr>`;
      })}</tbody></table>`;
  }
  const cell = (mask, back, head) => (hasHead(back, head) ? 'promoted' : hasHead(mask, head) ? 'held' : '');
  const names = { promoted: 'R', held: 'A', '': '–' };
  return html`<table class="heads">
    <caption>Layers and heads: A active, R brought back by a repair, – evicted</caption>
    <thead><tr><th scope="col">layer</th>${Array.from({ length: heads }, (_, head) => html`<th scope="col" key=${head}>head ${head}</th>`)}</tr></thead>
    <tbody>
      ${layers.map(({ mask, back, layer }) => html`<tr key=${layer}><th scope="row">${layer}</th>
        ${Array.from({ length: heads }, (_, head) => {
          const kind = cell(mask, back, head);
          return html`<td key=${head} class=${kind}>${names[kind]}</td>`;
        })}</tr>`)}
    </tbody>
  </table>`;
}
