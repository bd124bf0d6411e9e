// @ts-check
/** Painting of the memory map: cells on one canvas; bands, hatching and the cursor on another. */
import { resolveColors } from '../core/theme.js';
import { columnOf, columnStart } from './cells.js';

export const BAND = 16;
export const GUTTER = 56;
const SMALLEST_ROW = 6;
const LARGEST_ROW = 26;
const HEIGHT = 230;

/**
 * @typedef {import('./cells.js').Cells} Cells
 * @typedef {{name: string, spans: Array<{start: number, stop: number, color: string, label: string}>}} Band
 * @typedef {{width: number, height: number, row: number, bands: number}} Layout
 */

/** Sizes of a map in CSS pixels. */
export function layOut(/** @type {number} */ width, /** @type {number} */ layers, /** @type {number} */ bands) {
  const row = Math.max(SMALLEST_ROW, Math.min(LARGEST_ROW, Math.floor(HEIGHT / Math.max(1, layers))));
  return { width, height: bands * BAND + layers * row, row, bands };
}

/** The colours of the theme: red, green and blue of each, and CSS colours of the rest. */
export function readPalette() {
  const [empty, active, promoted, text, line, accent, background] = resolveColors([
    '--map-empty', '--map-active', '--map-promoted', '--text', '--control', '--accent', '--bg',
  ]);
  return { empty: toRgb(empty), active: toRgb(active), promoted: toRgb(promoted), text, line, accent, background };
}

function toRgb(/** @type {string} */ color) {
  return color.match(/[\d.]+/g)?.slice(0, 3).map(Number) ?? [0, 0, 0];
}

/**
 * The colour of a cell: between empty and active by the share that is active, and towards promoted
 * by the share of that which a repair brought back.
 * @param {number} active 0 to 255
 * @param {number} promoted 0 to 255
 * @param {{empty: number[], active: number[], promoted: number[]}} palette
 */
export function mix(active, promoted, palette) {
  const share = active / 255;
  // A promoted token among many of its column shows: the root lifts small shares.
  const back = active > 0 ? Math.sqrt(Math.min(1, promoted / active)) : 0;
  return palette.empty.map((empty, index) => {
    const held = palette.active[index] + (palette.promoted[index] - palette.active[index]) * back;
    return Math.round(empty + (held - empty) * (back > 0 ? Math.max(share, 0.5) : share));
  });
}

/** Prepare a canvas for drawing in CSS pixels. */
function prepare(/** @type {HTMLCanvasElement} */ canvas, /** @type {Layout} */ layout) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(layout.width * ratio);
  canvas.height = Math.round(layout.height * ratio);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext('2d'));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, layout.width, layout.height);
  return context;
}

/**
 * Paint the cells alone: every pixel of a cell has its colour.
 * @param {HTMLCanvasElement} canvas
 * @param {Cells} cells
 * @param {Layout} layout
 */
export function paintCells(canvas, cells, layout) {
  const context = prepare(canvas, layout);
  if (!cells.columns || !cells.layers.length) return;
  const palette = readPalette();
  const image = new ImageData(cells.columns, cells.layers.length);
  const known = new Map();
  cells.layers.forEach(({ active, promoted }, layer) => {
    for (let column = 0; column < cells.columns; column += 1) {
      const key = active[column] * 256 + promoted[column];
      let color = known.get(key);
      if (!color) known.set(key, (color = mix(active[column], promoted[column], palette)));
      image.data.set([...color, 255], 4 * (layer * cells.columns + column));
    }
  });
  const small = new OffscreenCanvas(cells.columns, cells.layers.length);
  /** @type {OffscreenCanvasRenderingContext2D} */ (small.getContext('2d')).putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(small, GUTTER, layout.bands * BAND, layout.width - GUTTER, cells.layers.length * layout.row);
}

/** The left edge of a token, in CSS pixels; cells have no finer place than their column. */
export function toX(/** @type {Cells} */ cells, /** @type {Layout} */ layout, /** @type {number} */ position) {
  const share = (position - cells.start) / Math.max(1, cells.stop - cells.start);
  return GUTTER + Math.max(0, Math.min(1, share)) * (layout.width - GUTTER);
}

/**
 * Paint what lies over the cells.
 * @param {HTMLCanvasElement} canvas
 * @param {Cells} cells
 * @param {Layout} layout
 * @param {{bands: Band[], cursor: number | null, layer: number | null, drag: [number, number] | null,
 *   marks: Array<[number, number]>}} over
 */
export function paintOver(canvas, cells, layout, over) {
  const context = prepare(canvas, layout);
  const palette = readPalette();
  context.font = '11px system-ui, sans-serif';
  context.textBaseline = 'middle';
  paintBands(context, cells, layout, over.bands, palette);
  paintLabels(context, cells, layout, palette);
  if (!cells.columns) return;
  const top = layout.bands * BAND;
  const bottom = layout.height;
  hatch(context, cells, layout, [[0, cells.sinks], [cells.recentStart, cells.length]], palette.background);
  if (cells.turnStart !== null) hatch(context, cells, layout, [[cells.turnStart, cells.recentStart]], palette.background);
  context.lineWidth = 2;
  context.strokeStyle = palette.text;
  for (const [start, stop] of over.marks) {
    if (stop <= cells.start || start >= cells.stop) continue;
    const left = toX(cells, layout, start);
    context.strokeRect(left, top + 1, Math.max(3, toX(cells, layout, stop) - left), bottom - top - 2);
  }
  if (over.drag) {
    context.globalAlpha = 0.25;
    context.fillStyle = palette.accent;
    context.fillRect(Math.min(...over.drag), top, Math.abs(over.drag[1] - over.drag[0]), bottom - top);
    context.globalAlpha = 1;
  }
  if (over.cursor !== null && over.cursor >= cells.start && over.cursor < cells.stop) {
    const column = columnOf(cells, over.cursor);
    const left = toX(cells, layout, columnStart(cells, column));
    const right = toX(cells, layout, columnStart(cells, column + 1));
    outline(context, left, 0, Math.max(2, right - left), bottom, palette);
    if (over.layer !== null) outline(context, GUTTER, top + over.layer * layout.row, layout.width - GUTTER, layout.row, palette);
  }
}

/** A frame that is seen on any colour: light beside dark. */
function outline(context, left, top, width, height, palette) {
  context.lineWidth = 3;
  context.strokeStyle = palette.background;
  context.strokeRect(left, top, width, height);
  context.lineWidth = 1.5;
  context.strokeStyle = palette.text;
  context.strokeRect(left, top, width, height);
}

function hatch(context, cells, layout, ranges, color) {
  const top = layout.bands * BAND;
  context.save();
  context.beginPath();
  for (const [start, stop] of ranges) {
    if (stop <= start || stop <= cells.start || start >= cells.stop) continue;
    const left = toX(cells, layout, start);
    context.rect(left, top, toX(cells, layout, stop) - left, layout.height - top);
  }
  context.clip();
  context.beginPath();
  for (let x = GUTTER - layout.height; x < layout.width; x += 7) {
    context.moveTo(x, layout.height);
    context.lineTo(x + layout.height - top, top);
  }
  context.globalAlpha = 0.75;
  context.lineWidth = 1.25;
  context.strokeStyle = color;
  context.stroke();
  context.restore();
}

function paintBands(context, cells, layout, bands, palette) {
  bands.forEach((band, index) => {
    const top = index * BAND;
    context.fillStyle = palette.text;
    context.fillText(band.name, 2, top + BAND / 2);
    for (const { start, stop, color, label } of band.spans) {
      if (stop <= cells.start || start >= cells.stop) continue;
      const left = toX(cells, layout, start);
      const width = Math.max(label ? 1 : 5, toX(cells, layout, stop) - left);
      context.fillStyle = color;
      context.fillRect(Math.min(left, layout.width - 5), top + 2, Math.max(1, width - 1), BAND - 4);
      if (width > 6 + 6.5 * label.length) {
        context.fillStyle = palette.background;
        context.fillText(label, left + 4, top + BAND / 2 + 0.5);
      }
    }
  });
}

function paintLabels(context, cells, layout, palette) {
  const every = Math.max(1, Math.ceil(14 / layout.row));
  context.fillStyle = palette.text;
  cells.layers.forEach((_, layer) => {
    if (layer % every) return;
    context.fillText(`layer ${layer}`, 2, layout.bands * BAND + (layer + 0.5) * layout.row);
  });
}
