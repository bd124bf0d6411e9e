// @ts-check
/** The cells of the memory map: decoding, sums over layers, and runs of columns that are alike. */

/**
 * @typedef {{start: number, stop: number, columns: number, layers: Array<{active: Uint8Array, promoted: Uint8Array}>,
 *   length: number, kvHeads: number, sinks: number, recentStart: number, turnStart: number | null, head: number | null}} Cells
 */

/**
 * The API's map with its bytes decoded.
 * @param {any} map
 * @returns {Cells}
 */
export function decodeMap(map) {
  return {
    start: map.start,
    stop: map.stop,
    columns: map.columns,
    layers: map.layers.map(({ active, promoted }) => ({ active: decode(active), promoted: decode(promoted) })),
    length: map.length,
    kvHeads: map.kv_heads,
    sinks: map.sinks,
    recentStart: map.recent_start,
    turnStart: map.turn_start,
    head: map.head,
  };
}

function decode(/** @type {string} */ text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** The first token of a column; of `columns`, the stop. */
export function columnStart(/** @type {Cells} */ cells, /** @type {number} */ column) {
  return cells.start + Math.floor((column * (cells.stop - cells.start)) / cells.columns);
}

/** The column that has a token. */
export function columnOf(/** @type {Cells} */ cells, /** @type {number} */ position) {
  const tokens = cells.stop - cells.start;
  let column = Math.floor(((position - cells.start) * cells.columns) / tokens);
  while (column + 1 < cells.columns && columnStart(cells, column + 1) <= position) column += 1;
  while (column > 0 && columnStart(cells, column) > position) column -= 1;
  return column;
}

/**
 * What a column is, over all layers: the share of its rows that are active, and of those promoted.
 * @param {Cells} cells
 * @param {number} column
 */
export function sumColumn(cells, column) {
  let active = 0;
  let promoted = 0;
  for (const layer of cells.layers) {
    active += layer.active[column];
    promoted += layer.promoted[column];
  }
  const whole = 255 * cells.layers.length;
  return { active: active / whole, promoted: promoted / whole };
}

/**
 * @typedef {{start: number, stop: number, kind: 'evicted' | 'held' | 'part' | 'promoted', active: number, promoted: number}} Run
 */

/**
 * Neighbouring columns of one kind as runs of tokens: what the map shows, as text.
 * @param {Cells} cells
 * @returns {Run[]}
 */
export function findRuns(cells) {
  /** @type {Run[]} */
  const runs = [];
  for (let column = 0; column < cells.columns; column += 1) {
    const start = columnStart(cells, column);
    const stop = columnStart(cells, column + 1);
    const sums = sumColumn(cells, column);
    const kind = classify(sums);
    const last = runs.at(-1);
    if (last?.kind === kind) {
      const tokens = last.stop - last.start;
      const more = stop - start;
      last.active = (last.active * tokens + sums.active * more) / (tokens + more);
      last.promoted = (last.promoted * tokens + sums.promoted * more) / (tokens + more);
      last.stop = stop;
    } else {
      runs.push({ start, stop, kind, ...sums });
    }
  }
  return runs;
}

function classify(/** @type {{active: number, promoted: number}} */ { active, promoted }) {
  if (promoted > 0) return 'promoted';
  if (active === 0) return 'evicted';
  return active === 1 ? 'held' : 'part';
}

/** A run in words. */
export function describeRun(/** @type {Run} */ run) {
  const rows = `${Math.round(100 * run.active)}% of the rows are active`;
  switch (run.kind) {
    case 'evicted':
      return 'evicted in all layers';
    case 'held':
      return 'active in all layers';
    case 'promoted':
      return `brought back by repair (${Math.round(100 * run.promoted)}% of the rows); ${rows}`;
    default:
      return `active in part: ${rows}`;
  }
}
