// @ts-check
/** The memory map: tokens in order by layers, zoomed by drag and keys, with a cursor on a token. */
import { useThemeVersion } from '../core/theme.js';
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from '../core/ui.js';
import { columnOf, columnStart } from './cells.js';
import { BAND, GUTTER, layOut, paintCells, paintOver } from './painter.js';

const SMALLEST_VIEW = 16;
export const KEYS = 'Arrow keys move, + and − zoom, 0 shows all, Page Up and Page Down move by half a view, Enter says why.';

/**
 * `view`: the tokens that are asked for, which `cells` are as soon as they are loaded.
 * @param {{cells: import('./cells.js').Cells, view: [number, number], bands: import('./painter.js').Band[], cursor: number | null,
 *   marks?: Array<[number, number]>, label: string, onView: (start: number, stop: number) => void,
 *   onCursor: (position: number) => void, onOpen: (position: number) => void, onWidth: (width: number) => void}} props
 */
export function MemoryMap({ cells, view, bands, cursor, marks = [], label, onView, onCursor, onOpen, onWidth }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null));
  const base = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const over = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const [width, setWidth] = useState(0);
  const [layer, setLayer] = useState(/** @type {number | null} */ (null));
  const [hover, setHover] = useState(/** @type {{position: number, layer: number | null} | null} */ (null));
  const [drag, setDrag] = useState(/** @type {[number, number] | null} */ (null));
  const theme = useThemeVersion();
  const layout = useMemo(() => layOut(width, cells.layers.length, bands.length), [width, cells.layers.length, bands.length]);

  useLayoutEffect(() => {
    const element = /** @type {HTMLDivElement} */ (frame.current);
    const observer = new ResizeObserver(() => {
      setWidth(element.clientWidth);
      onWidth(Math.max(1, element.clientWidth - GUTTER));
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (base.current && width) paintCells(base.current, cells, layout);
  }, [cells, layout, theme]);
  useEffect(() => {
    if (over.current && width) paintOver(over.current, cells, layout, { bands, cursor, layer, drag, marks });
  }, [cells, layout, theme, bands, cursor, layer, drag, marks]);

  const find = (/** @type {PointerEvent} */ event) => {
    const box = /** @type {HTMLElement} */ (frame.current).getBoundingClientRect();
    const x = Math.max(GUTTER, Math.min(width - 1, event.clientX - box.left));
    const share = (x - GUTTER) / Math.max(1, width - GUTTER);
    const position = Math.min(cells.stop - 1, cells.start + Math.floor(share * (cells.stop - cells.start)));
    const row = Math.floor((event.clientY - box.top - bands.length * BAND) / layout.row);
    return { x, position, layer: row >= 0 && row < cells.layers.length ? row : null };
  };
  const zoom = (/** @type {number} */ factor) => {
    const middle = cursor !== null && cursor >= view[0] && cursor < view[1] ? cursor : Math.floor((view[0] + view[1]) / 2);
    const tokens = Math.min(cells.length, Math.max(SMALLEST_VIEW, Math.round((view[1] - view[0]) * factor)));
    const start = Math.max(0, Math.min(cells.length - tokens, middle - Math.floor(tokens / 2)));
    onView(start, start + tokens);
  };
  const show = (/** @type {number} */ position) => {
    const tokens = view[1] - view[0];
    onCursor(position);
    if (position < view[0] || position >= view[1]) {
      const start = Math.max(0, Math.min(cells.length - tokens, position - Math.floor(tokens / 2)));
      onView(start, start + tokens);
    }
  };
  const step = (/** @type {number} */ columns) => {
    const here = cursor === null || cursor < view[0] || cursor >= view[1] ? view[0] : cursor;
    const wide = Math.max(1, Math.round((view[1] - view[0]) / cells.columns));
    show(Math.max(0, Math.min(cells.length - 1, here + columns * wide)));
  };
  const half = Math.max(1, Math.floor(cells.columns / 2));
  /** @type {Record<string, () => void>} */
  const actions = {
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
    PageUp: () => step(-half),
    PageDown: () => step(half),
    Home: () => show(0),
    End: () => show(cells.length - 1),
    ArrowUp: () => setLayer(Math.max(0, (layer ?? 1) - 1)),
    ArrowDown: () => setLayer(Math.min(cells.layers.length - 1, (layer ?? -1) + 1)),
    '+': () => zoom(0.5),
    '=': () => zoom(0.5),
    '-': () => zoom(2),
    0: () => onView(0, cells.length),
    Enter: () => cursor !== null && onOpen(cursor),
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !cells.columns) return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  const onPointerUp = (/** @type {PointerEvent} */ event) => {
    if (!drag) return;
    setDrag(null);
    const { position } = find(event);
    if (Math.abs(drag[1] - drag[0]) < 5) {
      onCursor(position);
      onOpen(position);
      return;
    }
    const toPosition = (/** @type {number} */ x) =>
      cells.start + Math.floor(((x - GUTTER) / Math.max(1, width - GUTTER)) * (cells.stop - cells.start));
    const [from, to] = [toPosition(Math.min(...drag)), toPosition(Math.max(...drag)) + 1];
    const missing = Math.max(0, SMALLEST_VIEW - (to - from));
    const start = Math.max(0, Math.min(from - Math.floor(missing / 2), cells.length - SMALLEST_VIEW));
    onView(start, Math.min(cells.length, Math.max(to, start + SMALLEST_VIEW)));
  };
  return html`
    <div ref=${frame} class="map" tabindex="0" role="application" aria-roledescription="memory map" aria-label=${label}
      aria-describedby="map-keys map-line" style=${{ height: `${layout.height}px` }} onKeyDown=${onKeyDown}
      onPointerDown=${(event) => {
        if (event.button !== 0 || !cells.columns) return;
        frame.current?.setPointerCapture(event.pointerId);
        const { x } = find(event);
        setDrag([x, x]);
      }}
      onPointerMove=${(event) => {
        if (!cells.columns) return;
        const found = find(event);
        setHover({ position: found.position, layer: found.layer });
        if (drag) setDrag([drag[0], found.x]);
      }}
      onPointerUp=${onPointerUp} onPointerCancel=${() => setDrag(null)} onPointerLeave=${() => setHover(null)}>
      <canvas ref=${base} class="cells" aria-hidden="true"></canvas>
      <canvas ref=${over} class="over" aria-hidden="true"></canvas>
    </div>
    <p class="map-line" id="map-line" role="status">${describe(cells, hover ?? (cursor === null ? null : { position: cursor, layer }))}</p>
    <p class="hidden" id="map-keys">${KEYS}</p>`;
}

/** A place on the map in words. */
function describe(cells, place) {
  if (!place || place.position < cells.start || place.position >= cells.stop) {
    return cells.columns ? `Tokens ${cells.start} to ${cells.stop - 1} of ${cells.length}` : 'No token yet';
  }
  const column = columnOf(cells, place.position);
  const first = columnStart(cells, column);
  const last = columnStart(cells, column + 1) - 1;
  const name = first === last ? `token ${first}` : `tokens ${first} to ${last}`;
  const chosen = place.layer === null ? cells.layers : [cells.layers[place.layer]];
  const share = (kind) => Math.round(chosen.reduce((sum, layer) => sum + layer[kind][column], 0) / chosen.length / 2.55);
  const where = place.layer === null ? 'over all layers' : `layer ${place.layer}`;
  const promoted = share('promoted');
  return `${name}, ${where}: ${share('active')}% active${promoted ? `, ${promoted}% brought back by repair` : ''}`;
}
