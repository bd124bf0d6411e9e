// @ts-check
/** How the service is: its model, workers, the last fifteen minutes, and whatever is wrong. */
import { Failure, Figures, Freshness, Loaded, PageHead } from '../components/basics.js';
import { Chart } from '../components/chart.js';
import { bytes, count, moment, seconds } from '../core/format.js';
import { useCounter, useResource, useStream } from '../core/resource.js';
import { BASE } from '../core/router.js';
import { html, useMemo } from '../core/ui.js';

const POLL_MS = 15000;

export function OverviewPage() {
  const [version, bump] = useCounter(1000);
  const options = { version, every: POLL_MS };
  const overview = useResource('/v1/overview', options);
  const model = useResource('/v1/worker');
  const release = useResource('/version');
  const workers = useResource('/v1/workers', options);
  const live = useStream('/v1/stream', ({ data }) => data.status !== 'started' && bump());
  // Without the scope `admin` the workers are not shown; the rest is.
  const hidden = workers.error?.status === 403;
  return html`
    <${PageHead} title="Overview"><${Freshness} live=${live} resource=${overview} every=${POLL_MS / 1000} /><//>
    ${model.error && !overview.error && html`<${Failure} error=${model.error} />`}
    ${workers.error && !hidden && !overview.error && html`<${Failure} error=${workers.error} />`}
    ${model.data && html`<${Model} model=${model.data} release=${release.data} workers=${workers.data} />`}
    <${Loaded} resource=${overview}>${(data) => html`
      <section class="panel" aria-label="Anything wrong"><h2>Anything wrong?</h2>
        <${Warnings} totals=${data.totals} workers=${hidden ? [] : workers.data?.workers} hidden=${hidden} /></section>
      <${Activity} overview=${data} />`}<//>`;
}

function Model({ model, release, workers }) {
  const up = workers?.workers.length;
  return html`<${Figures} items=${[
    ['Model', model.model.split('/').at(-1) || model.model, describeLayers(model)],
    ['Stored', bytes(sum(model, 'token_bytes')), describeState(model)],
    ['Context', count(model.max_context), describeEnd(model)],
    ['Budgets', `${count(model.min_budget)} to ${count(model.max_budget)}`, 'rows'],
    up !== undefined && ['Workers', html`<a href=${`${BASE}/workers`}>${up} up</a>`],
    release && ['kvrecall', release.version, release.revision],
  ]} />`;
}

/** Where sessions with recall end. */
function describeEnd(model) {
  const most = model.max_session_tokens;
  if (most === null || most === undefined) return 'tokens; with recall sessions go on';
  return most === model.max_context ? 'tokens' : `tokens; sessions end at ${count(most)}`;
}

/** What the layers keep; of full attention alone, the heads. */
function describeLayers(model) {
  const kinds = model.layer_kinds;
  if (kinds.length < 2) return `${model.layers} layers, ${model.kv_heads} KV heads`;
  return kinds.map((kind) => `${kind.layers} × ${kind.name}`).join(', ');
}

/** What a state takes beside the rows of a token, of a model that has any. */
function describeState(model) {
  const state = sum(model, 'state_bytes');
  return state ? `a token, and ${bytes(state)} a state` : 'a token';
}

/** Bytes of one member of all kinds of layers. */
function sum(model, member) {
  return model.layer_kinds.reduce((total, kind) => total + kind[member], 0);
}

/** @param {{totals: any, workers: any[] | undefined, hidden: boolean}} props workers: undefined where they are not known yet */
function Warnings({ totals, workers, hidden }) {
  const lines = findWarnings(totals, workers ?? []);
  if (workers && !workers.length && !hidden) lines.unshift(['No worker answers.', 'New sessions and turns are refused until one does: look at its log, or start one.']);
  if (!lines.length && !workers) return html`<p class="note">It is not known yet how the workers are.</p>`;
  if (!lines.length) return html`<p class="fine">✓ Nothing in the last 15 minutes.</p>`;
  return html`<ul class="warnings">${lines.map(([what, advice]) => html`<li key=${what}><strong>${what}</strong> ${advice}</li>`)}</ul>`;
}

/**
 * What is wrong, each with what it means and what helps.
 * @returns {Array<[string, string]>}
 */
function findWarnings(totals, workers) {
  /** @type {Array<[string, string]>} */
  const lines = [];
  const add = (number, forms, advice) => {
    const [one, several] = forms.split('|');
    if (number > 0) lines.push([`${count(number)} ${number === 1 ? one : several}.`, advice]);
  };
  if (workers.length && workers.every(({ draining }) => draining)) lines.push(['All workers are draining.', 'New sessions are refused: start a worker.']);
  add(totals.not_durable_turns, 'turn was not durable|turns were not durable', 'Rows were in memory only at the commit: a crash of the worker would cost a prefill. Look at the tiers of the workers.');
  add(totals.failed_turns, 'turn failed|turns failed', 'Cancelled ones count too. The log has the code of each.');
  add(totals.failed_creations, 'session could not be created|sessions could not be created', 'No worker took it: the client was told to try again. Look at the workers.');
  add(totals.retried_turns, 'turn was repeated in another worker|turns were repeated in another worker', 'A worker was lost. The client saw one answer.');
  add(totals.failed_repairs, 'repair failed|repairs failed', 'Turns go on without what it would have brought back.');
  add(totals.timeouts, 'pause timed out|pauses timed out', 'The model reads the timeout as the tool’s result.');
  add(totals.rebuilt_pages, 'page was lost and computed again|pages were lost and computed again', 'Repeated, it is a failing disk.');
  for (const { name, stats } of workers) {
    for (const tier of stats?.tiers ?? []) {
      if (tier.failure) lines.push([`Tier ${tier.name} of ${name} fails.`, `${tier.failure}. Rows go to other tiers meanwhile.`]);
      if (tier.limit_bytes > 0 && tier.name !== 'ram' && tier.bytes > 0.9 * tier.limit_bytes) {
        lines.push([`Tier ${tier.name} of ${name} is ${Math.round((100 * tier.bytes) / tier.limit_bytes)}% full.`, 'When it is full, pages are refused there.']);
      }
    }
  }
  return lines;
}

function Activity({ overview }) {
  const { totals, steps, active } = overview;
  const chart = useMemo(() => {
    const times = steps.map(({ at }) => Date.parse(at) / 1000);
    const values = (name) => steps.map((step) => step[name]);
    return {
      times,
      turns: [
        { name: 'turns', values: values('turns'), color: '--accent' },
        { name: 'repairs', values: values('repairs'), color: '--promoted-text', dash: [6, 4] },
      ],
      first: [
        { name: 'median', values: values('first_token_seconds_p50'), color: '--accent' },
        { name: '95%', values: values('first_token_seconds_p95'), color: '--promoted-text', dash: [6, 4] },
      ],
    };
  }, [steps]);
  const running = Object.entries(active).filter(([, number]) => number > 0).map(([state, number]) => `${number} ${state}`).join(', ');
  return html`
    <h2>The last ${Math.round(overview.window_seconds / 60)} minutes</h2>
    <${Figures} items=${[
      ['Sessions', html`<a href=${`${BASE}/sessions`}>${count(overview.sessions)}</a>`, running || 'none works'],
      ['Turns', count(totals.turns), `tokens: ${count(totals.prompt_tokens)} in, ${count(totals.output_tokens)} out`],
      ['First token', seconds(totals.first_token_seconds_p50), `median; 95%: ${seconds(totals.first_token_seconds_p95)}`],
      ['Repairs', count(totals.repairs), `${count(totals.in_pause_repairs)} within the pause`],
      ['Brought back', count(totals.promoted), 'tokens'],
      ['Moves', count(totals.moves)],
    ]} />
    <div class="grid">
      <section class="panel" aria-label="Turns and repairs"><h3>Turns and repairs per ${overview.step_seconds} s</h3>
        <${Chart} label="Turns and repairs over time" times=${chart.times} series=${chart.turns} format=${(value) => String(Math.round(10 * value) / 10)} /></section>
      <section class="panel" aria-label="First token"><h3>Time to the first token</h3>
        <${Chart} label="Time to the first token over time" times=${chart.times} series=${chart.first} format=${(value) => seconds(value)} /></section>
    </div>
    <p class="note">As this gateway saw it, since ${moment(overview.since)}.</p>`;
}
