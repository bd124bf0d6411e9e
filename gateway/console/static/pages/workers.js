// @ts-check
/** Workers: load, slots with their sessions, tiers; and moving a session from one to another. */
import { Bar, Dialog, Empty, Failure, Figures, Freshness, Loaded, PageHead, State, Table } from '../components/basics.js';
import { post, sessionPath, toQuery } from '../core/api.js';
import { bytes, count, percent, seconds } from '../core/format.js';
import { useCounter, useResource, useStream } from '../core/resource.js';
import { sessionAddress } from '../core/router.js';
import { html, useState } from '../core/ui.js';

const SHOWN = 50;
const POLL_MS = 10000;

/** @param {{readOnly: boolean}} props */
export function WorkersPage({ readOnly }) {
  const [version, bump] = useCounter(1000);
  const workers = useResource('/v1/workers', { version, every: POLL_MS });
  const live = useStream('/v1/stream', ({ data }) => data.status !== 'started' && bump());
  return html`
    <${PageHead} title="Workers"><${Freshness} live=${live} resource=${workers} every=${POLL_MS / 1000} /><//>
    <${Loaded} resource=${workers}>${(data) => html`
      ${!data.workers.length && html`<${Empty}>No worker answers: turns are refused until one does.<//>`}
      ${data.workers.map((worker) => html`<${Worker} key=${worker.name} worker=${worker} version=${version} readOnly=${readOnly}
        others=${data.workers.filter(({ name, draining }) => name !== worker.name && !draining)} onMoved=${bump} />`)}`}
    <//>`;
}

function Worker({ worker, others, version, readOnly, onMoved }) {
  const { name, slots, free_slots: free, stats } = worker;
  const used = slots - free;
  return html`<section class="panel" aria-label=${`Worker ${name}`}>
    <div class="row middle"><h2>${name}</h2>${worker.draining && html`<strong>draining: takes no new session</strong>`}</div>
    <${Figures} items=${[
      ['Slots', `${used} of ${slots}`, 'hold a session'],
      ['Sessions', count(worker.sessions), 'open'],
      ['Queued', count(worker.queued), 'calls'],
      ['Address', worker.address || 'this process'],
      stats && ['Tokens computed', count(stats.prefilled_tokens)],
      stats && ['Pages', count(stats.lost_pages), `lost, ${count(stats.rebuilt_pages)} computed again`],
    ]} />
    <${Bar} total=${slots} text=${`${used} of ${slots} slots hold a session`} parts=${[{ name: 'used', value: used, color: 'var(--map-active)' }]} />
    ${stats ? html`<${Tiers} tiers=${stats.tiers} />` : html`<p class="note">The worker reports no figures now.</p>`}
    <${Sessions} worker=${name} others=${others} version=${version} readOnly=${readOnly} onMoved=${onMoved} />
  </section>`;
}

function Tiers({ tiers }) {
  const asked = ({ hits, misses }) => hits + misses;
  const columns = [
    { name: 'Tier', value: (tier) => tier.name },
    { name: 'Holds', number: true, value: (tier) => bytes(tier.bytes) },
    { name: 'Limit', number: true, value: (tier) => (tier.limit_bytes ? `${bytes(tier.limit_bytes)}, ${percent(tier.bytes / tier.limit_bytes)} full` : 'none') },
    { name: 'Found', number: true, value: (tier) => (asked(tier) ? `${percent(tier.hits / asked(tier))} of ${count(asked(tier))}` : '–') },
    { name: 'Read', number: true, value: (tier) => `${bytes(tier.read_bytes)} in ${seconds(tier.read_seconds)}` },
    { name: 'Written', number: true, value: (tier) => `${bytes(tier.written_bytes)} in ${seconds(tier.write_seconds)}` },
    { name: 'Refused pages', number: true, value: (tier) => count(tier.refused_pages) },
    { name: 'Errors', number: true, value: (tier) => count(tier.errors) },
    { name: 'Health', wide: true, value: (tier) => (tier.failure ? html`<strong>fails: ${tier.failure}</strong>` : 'works') },
  ];
  return html`<${Table} caption="Tiers" columns=${columns} rows=${tiers} id=${(tier) => tier.name} empty="No tier." />`;
}

function Sessions({ worker, others, version, readOnly, onMoved }) {
  const sessions = useResource(`/v1/sessions${toQuery({ worker, order: 'updated', limit: SHOWN })}`, { version });
  const [moving, setMoving] = useState(/** @type {any} */ (null));
  const mayMove = !readOnly && others.length > 0;
  const columns = [
    { name: 'Session', value: (session) => html`<a class="mono" href=${sessionAddress(session.id)}>${session.id}</a>` },
    { name: 'State', value: (session) => html`<${State} state=${session.state} />` },
    { name: 'Length', number: true, value: (session) => count(session.length) },
    { name: 'Active', number: true, value: (session) => count(session.memory.active_rows) },
    ...(mayMove ? [{ name: 'Move', value: (session) => html`<button type="button" onClick=${() => setMoving(session)}>Move ${session.id}</button>` }] : []),
  ];
  return html`<${Loaded} resource=${sessions}>${(data) => html`
      <${Table} caption="Its sessions, the last updated first" columns=${columns} rows=${data.sessions} id=${(session) => session.id}
        empty="It has no session of this tenant." />`}
    <//>
    ${moving && html`<${Move} session=${moving} from=${worker} others=${others} onClose=${() => setMoving(null)} onMoved=${onMoved} />`}`;
}

function Move({ session, from, others, onClose, onMoved }) {
  const [worker, setWorker] = useState(others[0].name);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [busy, setBusy] = useState(false);
  const move = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await post(sessionPath(session.id, '/move'), { worker });
      onMoved();
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  return html`<${Dialog} open title=${`Move ${session.id}?`} onClose=${onClose}>
    <form onSubmit=${move}>
      <p>It leaves ${from}. With Redis its rows are loaded there; without, they are computed again from the log.</p>
      <${Failure} error=${error} />
      <div class="row">
        <label class="field">To<select value=${worker} onChange=${(event) => setWorker(event.target.value)}>
          ${others.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label>
        <button type="submit" class="primary" disabled=${busy}>Move</button>
        <button type="button" onClick=${onClose}>Keep it</button>
      </div>
    </form>
  <//>`;
}
