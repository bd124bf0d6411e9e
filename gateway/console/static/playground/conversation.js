// @ts-check
/** A conversation with a session, and the same one with the full cache beside it, if there is one. */
import { html, useCallback, useRef, useState } from '../core/ui.js';
import { compareTurn, sendEvent, streamTurn } from './calls.js';

/**
 * @typedef {{messages: any[], text: string, turn: number | null}} Draft what was sent and is not in the log yet
 * @typedef {{text: string, calls: any[], active: number, length: number, fidelity: any}} Answer
 */

/**
 * Turns and events of a session, one at a time. `send` and `report` return whether it worked; what
 * did not is in `error`.
 * @param {string | null} session
 * @param {string | null} full the session with the full cache
 */
export function useConversation(session, full) {
  const [draft, setDraft] = useState(/** @type {Draft | null} */ (null));
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [answers, setAnswers] = useState(/** @type {{own: Answer, full: Answer} | null} */ (null));
  const results = useRef(/** @type {string[]} */ ([]));

  const attempt = useCallback(async (/** @type {() => Promise<any>} */ work) => {
    setBusy(true);
    setError(null);
    try {
      return await work();
    } catch (failure) {
      setError(failure);
      setDraft(null);
      return null;
    } finally {
      setBusy(false);
    }
  }, []);

  const send = useCallback(
    (/** @type {any} */ body, ids = { session, full }) =>
      attempt(async () => {
        if (ids.session === null) return null;
        setDraft({ messages: body.messages, text: '', turn: null });
        setAnswers(null);
        const recorded = body.messages.some(({ role }) => role === 'assistant');
        const sent = results.current;
        results.current = [];
        // Distributions are compared over recorded replies: the full cache's come first.
        const beside = ids.full === null ? null : compareTurn(ids.full, { ...body, repair: null, wait_for_repairs: false, logprobs: { save: recorded } }, sent);
        const compared = recorded && beside !== null ? { logprobs: { compare_with: ids.full } } : {};
        if (compared.logprobs) await beside;
        const own = streamTurn(ids.session, { ...body, ...compared }, ({ name, data }) => {
          if (name === 'token') setDraft((before) => before && { ...before, text: before.text + data.text });
        });
        const [turn, other] = await Promise.all([own, beside]);
        setDraft((before) => before && { ...before, turn: turn.turn });
        if (other !== null) setAnswers({ own: toAnswer(turn), full: toAnswer(other) });
        return turn;
      }),
    [session, full, attempt],
  );

  const report = useCallback(
    (/** @type {any} */ event, /** @type {string | null} */ id = session) =>
      attempt(async () => {
        const receipt = await sendEvent(/** @type {string} */ (id), event);
        if (event.result !== undefined) results.current = [...results.current, event.result];
        return receipt;
      }),
    [session, attempt],
  );
  return { draft, busy, error, answers, send, report, forget: useCallback(() => (setDraft(null), setAnswers(null), setError(null)), []) };
}

/** @returns {Answer} */
function toAnswer(turn) {
  return {
    text: turn.message?.content ?? '',
    calls: turn.message?.tool_calls ?? [],
    active: turn.memory.active_rows,
    length: turn.memory.length,
    fidelity: turn.fidelity,
  };
}

/** Both answers of the last turn, and how far the distributions were apart. */
export function Answers({ answers }) {
  if (!answers) return null;
  const { own, full } = answers;
  const text = ({ text: content, calls }) => [content, ...calls.map(({ function: called }) => `calls ${called.name}(${called.arguments})`)].filter(Boolean).join('\n');
  const rows = ({ active, length }) => `${active} of ${length} tokens active in the largest layer`;
  const card = (title, answer) => html`<div class="panel"><h3>${title}</h3>
    <p class="passage">${text(answer) || 'no answer: recorded messages only'}</p><p class="note">${rows(answer)}</p></div>`;
  const alike = text(own) === text(full);
  return html`<section aria-label="Comparison" aria-live="polite">
    <h2>Compared with the full cache</h2>
    <div class="answers">${card('This session', own)}${card('Full cache', full)}</div>
    <p>${text(own) || text(full) ? html`<strong>${alike ? 'The answers are the same.' : 'The answers differ.'}</strong>` : ''}
      ${own.fidelity && ` Over ${own.fidelity.tokens} recorded tokens: KL divergence ${own.fidelity.kl_mean.toFixed(4)} nats, the same likeliest token in ${Math.round(100 * own.fidelity.top1_agreement)}%.`}</p>
  </section>`;
}
