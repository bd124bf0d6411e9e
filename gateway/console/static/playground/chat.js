// @ts-check
/** The conversation with the session: its log, the turn that runs, and the next message. */
import { Messages } from '../components/message.js';
import { html, useEffect, useRef, useState } from '../core/ui.js';

/**
 * @param {{turns: any[], draft: import('./conversation.js').Draft | null}} props
 */
export function Log({ turns, draft }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const last = turns.at(-1)?.turn ?? 0;
  // The log has it as soon as the turn is committed and loaded.
  const pending = draft && (draft.turn === null || draft.turn > last) ? draft : null;
  useEffect(() => {
    if (box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [last, pending?.text, pending?.messages]);
  return html`<div ref=${box} class="chat" tabindex="0" role="log" aria-label="Conversation">
    ${!turns.length && !pending && html`<p class="note">Nothing was said yet. Try “Please note that the extension list says Melnor K4821.”</p>`}
    ${turns.map((turn) => html`<${Messages} key=${turn.turn} messages=${turn.messages} answer=${turn.answer} />`)}
    ${pending && html`<${Messages} messages=${pending.messages} answer=${null} />
      <div class="message assistant"><div class="role">assistant</div><div class="text">${pending.text || '…'}</div></div>`}
  </div>`;
}

/**
 * @param {{busy: boolean, paused: boolean, onSend: (body: any) => Promise<any>}} props
 */
export function Composer({ busy, paused, onSend }) {
  const [text, setText] = useState('');
  const [tokens, setTokens] = useState(60);
  const [repair, setRepair] = useState(false);
  const send = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const content = text.trim();
    if (!content || busy || paused) return;
    setText('');
    const sent = await onSend({ messages: [{ role: 'user', content }], max_tokens: tokens, ...(repair ? { repair: true } : {}) });
    if (sent === null) setText(content);
  };
  return html`<form class="panel" aria-label="Next message" onSubmit=${send}>
    <label class="field">Message<textarea rows="2" value=${text} disabled=${paused} onInput=${(event) => setText(event.target.value)}
      onKeyDown=${(event) => event.key === 'Enter' && !event.shiftKey && !event.isComposing && send(event)}></textarea></label>
    <div class="row middle">
      <button type="submit" class="primary" disabled=${busy || paused || !text.trim()}>Send</button>
      <label class="field">Most tokens<input type="number" min="1" max="4096" value=${tokens} onInput=${(event) => setTokens(Math.max(1, Number(event.target.value)))} /></label>
      <label class="check"><input type="checkbox" checked=${repair} onChange=${(event) => setRepair(event.target.checked)} />Repair on this message first</label>
      <span class="note" role="status">${busy ? 'working…' : paused ? 'The pause comes first.' : ''}</span>
    </div>
  </form>`;
}
