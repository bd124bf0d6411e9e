// @ts-check
/** A session's memory: the map over its tokens, the text beneath, and why a token is where it is. */
import { Empty, Failure, Figures } from '../components/basics.js';
import { sessionPath, toQuery } from '../core/api.js';
import { bytes, count } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { readNumber, useQuery } from '../core/router.js';
import { html, useMemo, useState } from '../core/ui.js';
import { pausesPath, useBands, useTurns } from '../map/bands.js';
import { decodeMap } from '../map/cells.js';
import { Legend } from '../map/legend.js';
import { MemoryMap } from '../map/map.js';
import { RunsTable } from '../map/runs.js';
import { TokenText } from '../map/text.js';
import { Why } from '../map/why.js';

const MOST_COLUMNS = 2000;

/** @param {{session: any, version: number}} props */
export function MemoryPage({ session, version }) {
  const memory = useResource(sessionPath(session.id, '/memory'), { version });
  return html`
    <${Failure} error=${memory.error} retry=${memory.reload} />
    ${memory.data && html`<${MemoryFigures} session=${session} memory=${memory.data} />`}
    <${MapView} session=${session} version=${version} />`;
}

function MemoryFigures({ session, memory }) {
  const kept = Object.entries(memory.tier_bytes);
  return html`<${Figures} items=${[
    ['Active', count(memory.active_rows), `rows, ${bytes(memory.active_bytes)}`],
    ['Budget', count(memory.budget), `rows, repair ${count(session.research.repair_rows)}`],
    ['Peak', count(memory.peak_rows), `rows of ${count(memory.bound_rows)}`],
    ['Evicted', count(memory.evicted_rows), 'tokens'],
    ['Brought back', count(memory.promoted_rows), 'tokens'],
    ...kept.map(([tier, size]) => [`Kept in ${tier}`, bytes(size)]),
    ...(memory.retrieval_bytes ? [['To retrieve from', bytes(memory.retrieval_bytes)]] : []),
    ['In a slot', memory.in_slot ? 'yes' : 'no', memory.in_slot ? '' : 'swapped out'],
  ]} />`;
}

/**
 * The map with all that belongs to it. `marks`: ranges of tokens to frame. `brief`: map and legend
 * alone, with the text below; the address is left alone.
 * @param {{session: any, version: number, marks?: Array<[number, number]>, brief?: boolean}} props
 */
export function MapView({ session, version, marks = [], brief = false }) {
  const [query, change] = useQuery();
  const [own, setOwn] = useState(/** @type {Record<string, number | null>} */ ({}));
  const value = (name) => (brief ? own[name] ?? null : readNumber(query, name));
  const set = brief ? (values) => setOwn((before) => ({ ...before, ...values })) : change;
  const [width, setWidth] = useState(0);
  const [start, stop, head, cursor, why] = ['start', 'stop', 'head', 'token', 'why'].map(value);

  const asked = toQuery({ start, stop, head, columns: Math.min(MOST_COLUMNS, width || 512) });
  const map = useResource(sessionPath(session.id, `/memory/map${asked}`), { version });
  const [last, setLast] = useState(/** @type {any} */ (null));
  if (map.data && map.data !== last) setLast(map.data);
  const shown = map.data ?? (last?.session === session.id ? last : null);
  const cells = useMemo(() => shown && decodeMap(shown), [shown]);
  const turns = useTurns(session.id, session.turns, version);
  const pauses = useResource(pausesPath(session.id), { version });
  const bands = useBands(turns, pauses.data?.pauses ?? []);

  const onView = (from, to) => set({ start: from > 0 ? from : null, stop: cells && to < cells.length ? to : null });
  const open = (position) => set({ token: position, why: position });
  // A range or a head that is not there comes from an old address: all of the map is.
  const again = map.error?.status === 422 ? () => set({ start: null, stop: null, head: null }) : map.reload;
  if (!cells) {
    return html`<${Failure} error=${map.error} retry=${again} />
      ${!map.error && html`<p class="note" role="status">Loading…</p>`}`;
  }
  const view = [start ?? 0, Math.min(stop ?? cells.length, cells.length)];
  const label = `Memory map: ${cells.layers.length} layers by ${cells.length} tokens`;
  return html`
    <${Failure} error=${map.error} retry=${again} />
    <section aria-label="Memory map">
      <${Tools} cells=${cells} head=${head} onHead=${(value) => set({ head: value })} onView=${onView} brief=${brief} />
      <${MemoryMap} cells=${cells} view=${view} bands=${bands} cursor=${cursor} marks=${marks} label=${label} onView=${onView}
        onCursor=${(position) => set({ token: position })} onOpen=${open} onWidth=${setWidth} />
      <${Legend} />
      ${!brief && html`<${RunsTable} cells=${cells} onShow=${open} />`}
    </section>
    ${cells.length === 0
      ? html`<${Empty}>The session has no tokens yet: its first turn computes some.<//>`
      : html`<section class=${brief ? '' : 'reading'} aria-label="Text">
          <div><${TokenText} session=${session.id} length=${cells.length} version=${version} head=${head} cursor=${cursor}
            onCursor=${(position) => set({ token: position })} onOpen=${open} /></div>
          ${(!brief || why !== null) &&
          html`<${Why} session=${session.id} position=${why} version=${version} onClose=${() => set({ why: null })} />`}
        </section>`}`;
}

function Tools({ cells, head, onHead, onView, brief }) {
  const tokens = cells.stop - cells.start;
  const middle = Math.floor((cells.start + cells.stop) / 2);
  const zoom = (factor) => {
    const size = Math.min(cells.length, Math.max(16, Math.round(tokens * factor)));
    const from = Math.max(0, Math.min(cells.length - size, middle - Math.floor(size / 2)));
    onView(from, from + size);
  };
  const pan = (direction) => {
    const from = Math.max(0, Math.min(cells.length - tokens, cells.start + direction * Math.floor(tokens / 2)));
    onView(from, from + tokens);
  };
  const whole = tokens >= cells.length;
  return html`<div class="map-tools">
    <button type="button" disabled=${tokens <= 16} onClick=${() => zoom(0.5)}>Zoom in</button>
    <button type="button" disabled=${whole} onClick=${() => zoom(2)}>Zoom out</button>
    <button type="button" disabled=${whole} onClick=${() => onView(0, cells.length)}>All</button>
    ${!brief && html`
      <button type="button" disabled=${cells.start === 0} onClick=${() => pan(-1)}>Earlier</button>
      <button type="button" disabled=${cells.stop >= cells.length} onClick=${() => pan(1)}>Later</button>`}
    <label class="field">Heads
      <select value=${head === null ? '' : String(head)} onChange=${(event) => onHead(event.target.value === '' ? null : Number(event.target.value))}>
        <option value="">all ${cells.kvHeads}</option>
        ${Array.from({ length: cells.kvHeads }, (_, index) => html`<option key=${index} value=${String(index)}>head ${index}</option>`)}
      </select>
    </label>
  </div>`;
}
