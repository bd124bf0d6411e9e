// @ts-check
/** The script: a fact is stated, evicted, brought back in a tool's pause, and answered. */
import { get, sessionPath } from '../core/api.js';
import { html } from '../core/ui.js';
import { createSession } from './calls.js';
import { commonSettings, createFull } from './setup.js';
import { TOOLS, exampleResult } from './tools.js';

export const FACT = 'Melnor K4821';
export const QUESTION = 'Who is on call tonight, and what is their extension?';
const SEED = 1;
// Keeps the first and the newest tokens alone: what is forgotten is forgotten in all layers.
const METHOD = 'streaming_llm';
const POLL_MS = 200;
const LONGEST_REPAIR_MS = 60000;
const REPEATED = 10;
// Recorded, so that they are appended without generating.
const SMALL_TALK = [
  ['user', 'Hi, are you there?'],
  ['assistant', 'Yes, I am here.'],
  ['user', 'There is a dull race near the match.'],
  ['assistant', 'I see, sport it is.'],
  ['user', 'Someone asked me about the match today.'],
  ['assistant', 'Tell me more about the stadium.'],
  ['user', 'What should I do about the leash?'],
  ['assistant', 'You could write down what you like about pets.'],
  ['user', 'The vet was strange.'],
  ['assistant', 'Perhaps ask someone who knows about the vet.'],
].map(([role, content]) => ({ role, content }));

/**
 * @typedef {{session: string, full: string}} Ids
 * @typedef {{ids: Ids | null, worker: any, send: (body: any, ids: Ids) => Promise<any>, report: (event: any, session: string) => Promise<any>}} Stage
 * @typedef {{title: string, after: string, run: (stage: Stage) => Promise<Ids | boolean>}} Step run: false ends the script
 */

/** @type {Step[]} */
export const STEPS = [
  {
    title: 'A session with a budget of 256 rows, 64 of them for repair; beside it one with the full cache',
    after: 'Two sessions without a token. The first keeps the first and the newest tokens active (streaming_llm).',
    run: async ({ worker }) => {
      const common = { ...commonSettings(TOOLS.filter(({ name }) => name === 'on_call')), seed: SEED };
      const full = await createFull(common, worker.max_budget);
      const session = await createSession({ ...common, budget: Math.min(256, worker.max_budget), research: { method: METHOD, repair_rows: 64 } });
      return { session: session.id, full: full.id };
    },
  },
  {
    title: 'The user states a fact',
    after: 'Every token is active: the session is shorter than its budget.',
    run: async ({ send, ids }) => {
      const system = { role: 'system', content: 'Answer shortly and use the latest facts.' };
      if (!(await send({ messages: [system], generate: false }, ids))) return false;
      const content = `Please note that the extension list says ${FACT}.`;
      return (await send({ messages: [{ role: 'user', content }], max_tokens: 40 }, ids)) !== null;
    },
  },
  {
    title: 'A thousand tokens of small talk fill the budget',
    after: 'The framed tokens are the fact: forgotten by the model, kept in the row store.',
    run: async ({ send, ids }) =>
      (await send({ messages: Array.from({ length: REPEATED }, () => SMALL_TALK).flat(), generate: false }, ids)) !== null,
  },
  {
    title: 'A question: the model calls a tool, and the session pauses',
    after: 'The question alone does not name the person.',
    run: async ({ send, ids }) => {
      const turn = await send({ messages: [{ role: 'user', content: QUESTION }], max_tokens: 60 }, ids);
      return Boolean(turn?.message?.tool_calls?.length);
    },
  },
  {
    title: 'The tool answers “Melnor”: a repair scores the evicted rows against that',
    after: 'The fact is active again, in the second colour, before the next turn begins.',
    run: async ({ report, ids }) => {
      const { pending_calls: calls } = await get(sessionPath(ids.session));
      for (const call of calls) {
        if (!(await report({ type: 'tool_call.started', call_id: call.id }, ids.session))) return false;
        const result = exampleResult(call.name);
        if (!(await report({ type: 'tool_call.completed', call_id: call.id, result }, ids.session))) return false;
      }
      return waitForRepair(ids.session);
    },
  },
  {
    title: 'The next turn has what it needs',
    after: 'Answered out of a budget that could not hold the conversation.',
    run: async ({ send, ids }) => (await send({ messages: [], max_tokens: 60, wait_for_repairs: true }, ids)) !== null,
  },
];

/** Wait until a repair on a tool's result was committed; false after a minute without one. */
async function waitForRepair(/** @type {string} */ session) {
  const deadline = Date.now() + LONGEST_REPAIR_MS;
  while (Date.now() < deadline) {
    const { repairs } = await get(sessionPath(session, '/repairs?limit=4'));
    if (repairs.some(({ trigger }) => trigger === 'tool_result')) return true;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
  return false;
}

/**
 * @param {{done: number, running: boolean, failed: boolean, stepwise: boolean, onNext: () => void, onStepwise: (on: boolean) => void}} props
 */
export function ScriptPanel({ done, running, failed, stepwise, onNext, onStepwise }) {
  const over = done === STEPS.length || failed;
  return html`<section class="panel" aria-label="Script">
    <h2>How forgetting and repair look</h2>
    <ol class="steps">
      ${STEPS.map(({ title }, index) => html`<li key=${title} class=${index < done ? 'done' : ''} aria-current=${index === done && !over ? 'step' : null}>${title}</li>`)}
    </ol>
    <p role="status">${failed ? 'The script ended here: the model did not do what the reference model does.' : done > 0 ? STEPS[done - 1].after : ''}</p>
    <div class="row middle">
      <button type="button" class="primary" disabled=${running || over} onClick=${onNext}>Next step</button>
      <label class="check"><input type="checkbox" checked=${stepwise} onChange=${(event) => onStepwise(event.target.checked)} />Wait for me after each step</label>
    </div>
  </section>`;
}
