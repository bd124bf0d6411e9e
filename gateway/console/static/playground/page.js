// @ts-check
/** The playground: a conversation by hand, its pauses and repairs, and the map beside it. */
import { Failure, Figures, Freshness, Loaded, PageHead, State } from '../components/basics.js';
import { count } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { sessionAddress, useQuery } from '../core/router.js';
import { html, useEffect, useMemo, useRef, useState } from '../core/ui.js';
import { useTurns } from '../map/bands.js';
import { MapView } from '../pages/memory.js';
import { useSession } from '../pages/session.js';
import { Composer, Log } from './chat.js';
import { Answers, useConversation } from './conversation.js';
import { describeFact, useFact } from './fact.js';
import { Pause } from './pause.js';
import { FACT, STEPS, ScriptPanel } from './script.js';
import { Setup } from './setup.js';

/** Time to look at a step of the script before the next one. */
const LOOK_MS = 3000;

export function PlaygroundPage() {
  const [query, change] = useQuery();
  const id = query.get('session');
  const full = query.get('full');
  const methods = useResource('/v1/methods');
  const worker = useResource('/v1/worker');
  const { session, version, live, gone, resource } = useSession(id);
  const conversation = useConversation(id, full);
  const script = useScript(conversation, worker.data, (ids) => change({ session: ids.session, full: ids.full }));
  const leave = () => {
    script.stop();
    conversation.forget();
    change({ session: null, full: null });
  };
  return html`
    <${PageHead} title="Playground">
      ${session && html`<${State} state=${session.state} />`}
      ${session && html`<${Freshness} live=${live} resource=${resource} />`}
      <div class="actions">
        ${session && html`<a class="button" href=${sessionAddress(session.id)}>All of this session</a>`}
        ${id !== null && html`<button type="button" disabled=${conversation.busy} onClick=${leave}>New session</button>`}
        <button type="button" class="primary" disabled=${conversation.busy || script.running || !worker.data} onClick=${() => script.start(false)}>Play the script</button>
        <button type="button" disabled=${conversation.busy || script.running || !worker.data} onClick=${() => script.start(true)}>Step by step</button>
      </div>
    <//>
    <${Failure} error=${resource.error} />
    <${Failure} error=${conversation.error ?? script.error} />
    ${gone && html`<div class="problem" role="alert"><p>The session was deleted.</p></div>`}
    ${script.started && html`<${ScriptPanel} done=${script.done} running=${script.running} failed=${script.failed} stepwise=${script.stepwise}
      onNext=${script.next} onStepwise=${script.setStepwise} />`}
    ${id === null
      ? !script.started && html`<${Loaded} resource=${methods}>${(data) => worker.data && html`
          <p>Talk to a session under a small budget, be its tools, and watch what it forgets and gets back. The script does it in twenty seconds.</p>
          <${Setup} methods=${data} worker=${worker.data} onCreated=${(made, beside) => change({ session: made, full: beside })} />`}<//>`
      : session && html`<${Table} session=${session} version=${version} conversation=${conversation} scripted=${script.started} />`}`;
}

/** Conversation and map side by side. */
function Table({ session, version, conversation, scripted }) {
  const { draft, busy, answers, send, report } = conversation;
  const turns = useTurns(session.id, session.turns, version);
  const fact = useFact(scripted ? session.id : null, FACT, version);
  const marks = useMemo(() => (fact ? [[fact.start, fact.stop]] : []), [fact?.start, fact?.stop]);
  const paused = session.pending_calls.length > 0;
  const { memory } = session;
  return html`<div class="playground">
    <section aria-label="Conversation">
      <${Log} turns=${turns} draft=${draft} />
      ${paused && html`<${Pause} session=${session} version=${version} busy=${busy} report=${report}
        onTurn=${(wait) => send({ messages: [], max_tokens: 60, wait_for_repairs: wait })} />`}
      <${Composer} busy=${busy} paused=${paused} onSend=${send} />
      <${Answers} answers=${answers} />
    </section>
    <section aria-label="Memory">
      <${Figures} items=${[
        ['Active', count(memory.active_rows), `of ${count(memory.length)} tokens`],
        ['Budget', session.budget === 'auto' ? 'auto' : count(session.budget), `rows, repair ${count(session.research.repair_rows)}`],
        ['Evicted', count(memory.evicted_rows), 'tokens'],
        ['Brought back', count(memory.promoted_rows), 'tokens'],
      ]} />
      ${fact && html`<p role="status"><strong>“${FACT}”</strong> (framed) is ${describeFact(fact)}.</p>`}
      <${MapView} session=${session} version=${version} marks=${marks} brief />
    </section>
  </div>`;
}

/**
 * The script's progress. It goes on by itself, or waits for `next` after each step.
 * @param {any} conversation
 * @param {any} worker
 * @param {(ids: import('./script.js').Ids) => void} onCreated
 */
function useScript(conversation, worker, onCreated) {
  const [run, setRun] = useState(/** @type {{done: number, ids: any} | null} */ (null));
  const [running, setRunning] = useState(false);
  const [failed, setFailed] = useState(false);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [stepwise, setStepwise] = useState(false);
  const current = useRef(0);
  const step = async (done, ids, play) => {
    setRunning(true);
    let outcome = /** @type {any} */ (false);
    try {
      outcome = await STEPS[done].run({ ids, worker, send: conversation.send, report: conversation.report });
    } catch (failure) {
      if (play === current.current) setError(failure);
    }
    if (play !== current.current) return;
    setRunning(false);
    if (outcome === false) return setFailed(true);
    const made = outcome === true ? ids : outcome;
    if (outcome !== true) onCreated(made);
    setRun({ done: done + 1, ids: made });
  };
  useEffect(() => {
    if (!run || stepwise || running || failed || run.done === STEPS.length) return undefined;
    const timer = setTimeout(() => step(run.done, run.ids, current.current), run.done < 2 ? 0 : LOOK_MS);
    return () => clearTimeout(timer);
  }, [run, stepwise, running, failed]);
  const begin = (/** @type {boolean} */ waits) => {
    current.current += 1;
    setStepwise(waits);
    conversation.forget();
    setFailed(false);
    setError(null);
    setRun({ done: 0, ids: null });
  };
  return {
    started: run !== null, done: run?.done ?? 0, running, failed, error, stepwise, setStepwise,
    start: begin,
    next: () => run && step(run.done, run.ids, current.current),
    stop: () => {
      current.current += 1;
      setRun(null);
      setRunning(false);
    },
  };
}
