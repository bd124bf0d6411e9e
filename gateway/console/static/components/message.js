// @ts-check
/** A message of a conversation, put in as text and nothing else. */
import { plural } from '../core/format.js';
import { html } from '../core/ui.js';

/** Recorded messages of one turn that are shown; the rest is folded. */
const SHOWN = 4;

/** @param {{message: any, generated?: boolean}} props */
export function Message({ message, generated = false }) {
  const { role, content, tool_calls: calls, reasoning, name } = message;
  return html`<div class=${`message ${role}`}>
    <div class="role">${role}${name ? ` ${name}` : ''}${generated ? ', generated' : ''}</div>
    ${reasoning && html`<details><summary>reasoning</summary><div class="text">${reasoning}</div></details>`}
    ${content && html`<div class="text">${content}</div>`}
    ${(calls ?? []).map(({ id, function: called }) => html`<div key=${id} class="call">calls ${called.name}(${called.arguments})</div>`)}
  </div>`;
}

/** The messages of a turn, and its answer. */
export function Messages({ messages, answer }) {
  const folded = messages.length > SHOWN + 1 ? messages.slice(SHOWN) : [];
  const shown = folded.length ? messages.slice(0, SHOWN) : messages;
  return html`
    ${shown.map((message, index) => html`<${Message} key=${index} message=${message} />`)}
    ${folded.length > 0 && html`<details><summary class="note">${plural(folded.length, 'more message')} of this turn</summary>
      ${folded.map((message, index) => html`<${Message} key=${index} message=${message} />`)}</details>`}
    ${answer && html`<${Message} message=${answer} generated />`}`;
}
