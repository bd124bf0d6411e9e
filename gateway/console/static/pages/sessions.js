// @ts-check
/** The tenant's sessions, filtered, and their states live. */
import { Failure, Freshness, PageHead, State, Table } from '../components/basics.js';
import { toQuery } from '../core/api.js';
import { count, moment } from '../core/format.js';
import { useCounter, useResource, useStream } from '../core/resource.js';
import { BASE, sessionAddress, useQuery } from '../core/router.js';
import { html, useEffect, useRef, useState } from '../core/ui.js';

const SHOWN = 50;
const STATES = ['idle', 'paused', 'prefilling', 'decoding', 'repairing'];
const ORDERS = { '': 'newest first', updated: 'last updated first', length: 'longest first' };
const FILTERS = ['state', 'method', 'worker', 'q', 'order'];
const TYPING_MS = 250;

/** @param {{readOnly: boolean}} props */
export function SessionsPage({ readOnly }) {
  const [query, change] = useQuery();
  const [version, bump] = useCounter(400);
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name)]));
  const cursor = query.get('cursor');
  const resource = useResource(`/v1/sessions${toQuery({ limit: SHOWN, cursor, ...filters })}`, { version });
  const [states, live] = useStates(bump);
  const methods = useResource('/v1/methods');
  const page = resource.data;
  const rows = (page?.sessions ?? []).map((session) => ({ ...session, state: states.get(session.id) ?? session.state }));
  const filtered = FILTERS.some((name) => name !== 'order' && filters[name]);
  return html`
    <${PageHead} title="Sessions">
      <${Freshness} live=${live} resource=${resource} />
      <div class="actions">${!readOnly && html`<a class="button" href=${`${BASE}/playground`}>New session in the playground</a>`}</div>
    <//>
    <${Filters} filters=${filters} methods=${methods.data?.methods ?? []} change=${(values) => change({ ...values, cursor: null })} />
    <${Failure} error=${resource.error} retry=${resource.reload} />
    ${page === null
      ? !resource.error && html`<p class="note" role="status">Loading…</p>`
      : html`
        <${Table} caption=${filtered ? 'Sessions that match' : 'Sessions'} columns=${COLUMNS} rows=${rows} id=${(session) => session.id}
          empty=${filtered ? 'No session matches these filters.' : 'No session yet. The playground makes one, and so does every client of the API.'} />
        <${Pages} page=${page} cursor=${cursor} onCursor=${(value) => change({ cursor: value })} />`}`;
}

const COLUMNS = [
  { name: 'Session', value: (session) => html`<a class="mono" href=${sessionAddress(session.id)}>${session.id}</a>` },
  { name: 'State', value: (session) => html`<${State} state=${session.state} />` },
  { name: 'Method', value: (session) => session.research.method },
  { name: 'Budget', number: true, value: ({ budget }) => (budget === 'auto' ? budget : count(budget)) },
  { name: 'Length', number: true, value: (session) => count(session.length) },
  { name: 'Active', number: true, value: (session) => count(session.memory.active_rows) },
  { name: 'Evicted', number: true, value: (session) => count(session.memory.evicted_rows) },
  { name: 'Turns', number: true, value: (session) => count(session.turns) },
  { name: 'Durable', value: (session) => (session.durable === null ? '–' : session.durable ? 'yes' : 'no') },
  { name: 'Worker', value: (session) => session.worker || '–' },
  { name: 'Updated', value: (session) => moment(session.updated_at) },
  { name: 'Metadata', wide: true, value: (session) => Object.entries(session.metadata).map(([key, value]) => `${key}: ${value}`).join(', ') || '–' },
];

/** States by session, as events tell them; `bump` is called for whatever changes a row. */
function useStates(bump) {
  const [states, setStates] = useState(/** @type {ReadonlyMap<string, string>} */ (new Map()));
  const live = useStream('/v1/stream', ({ name, data }) => {
    if (name === 'snapshot') {
      setStates(new Map(data.active.map(({ session, state }) => [session, state])));
      bump();
    } else if (name === 'state') {
      setStates((before) => new Map(before).set(data.session, data.state));
    } else if (data.status !== 'started') {
      bump();
    }
  });
  return /** @type {[ReadonlyMap<string, string>, boolean]} */ ([live ? states : new Map(), live]);
}

function Filters({ filters, methods, change }) {
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  const later = (name) => (event) => {
    clearTimeout(timer.current);
    const { value } = event.target;
    timer.current = setTimeout(() => change({ [name]: value.trim() || null }), TYPING_MS);
  };
  const now = (name) => (event) => change({ [name]: event.target.value || null });
  const option = (value, text = value) => html`<option key=${value} value=${value}>${text}</option>`;
  return html`<form class="panel row" role="search" aria-label="Filters" onSubmit=${(event) => event.preventDefault()}>
    <label class="field">Text in id or metadata<input type="search" maxlength="200" value=${filters.q ?? ''} onInput=${later('q')} /></label>
    <label class="field">State<select value=${filters.state ?? ''} onChange=${now('state')}>${option('', 'any')}${STATES.map((state) => option(state))}</select></label>
    <label class="field">Method<select value=${filters.method ?? ''} onChange=${now('method')}>${option('', 'any')}${methods.map(({ name }) => option(name))}</select></label>
    <label class="field">Worker<input type="search" maxlength="200" value=${filters.worker ?? ''} onInput=${later('worker')} /></label>
    <label class="field">Order<select value=${filters.order ?? ''} onChange=${now('order')}>${Object.entries(ORDERS).map(([value, text]) => option(value, text))}</select></label>
  </form>`;
}

function Pages({ page, cursor, onCursor }) {
  return html`<nav class="row middle" aria-label="Pages of sessions">
    ${cursor && html`<button type="button" onClick=${() => onCursor(null)}>First page</button>`}
    ${page.next_cursor && html`<button type="button" onClick=${() => onCursor(page.next_cursor)}>Next page</button>`}
    <span class="note">${count(page.scanned)} sessions were looked at${page.truncated ? '; there are more, which this order leaves out' : ''}.</span>
  </nav>`;
}
