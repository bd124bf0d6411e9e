// @ts-check
/** A chart over time by uPlot, in the theme's colours, with its last values as text. */
import { resolveColors, useThemeVersion } from '../core/theme.js';
import { html, useEffect, useRef } from '../core/ui.js';
import uPlot from '../vendor/uPlot.esm.js';

const HEIGHT = 170;
// Its types are in a file that is not vendored.
const Plot = /** @type {any} */ (uPlot);

function clock(/** @type {number} */ time) {
  return new Date(1000 * time).toLocaleTimeString('en-GB');
}

/**
 * @param {{label: string, times: number[], series: Array<{name: string, values: Array<number | null>, color: string, dash?: number[]}>,
 *   format: (value: number) => string}} props times in seconds; `color` is a custom property
 */
export function Chart({ label, times, series, format }) {
  const place = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const theme = useThemeVersion();
  useEffect(() => {
    const element = /** @type {HTMLDivElement} */ (place.current);
    const [axis, grid] = resolveColors(['--muted', '--line']);
    const strokes = resolveColors(series.map(({ color }) => color));
    const common = { stroke: axis, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: '11px system-ui, sans-serif' };
    plot.current = new Plot(
      {
        width: element.clientWidth || 320,
        height: HEIGHT,
        cursor: { points: { size: 6 } },
        scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, low ?? 0) * 1.1 || 1] } },
        axes: [{ ...common, space: 70, values: (_, splits) => splits.map(clock) }, { ...common, size: 64, values: (_, splits) => splits.map(format) }],
        series: [{ label: 'time', value: (_, value) => (value === null ? '–' : clock(value)) }, ...series.map(({ name, dash }, index) => ({
          label: name, stroke: strokes[index], width: 2, dash, spanGaps: true, points: { size: 5 },
          value: (_, value) => (value === null ? '–' : format(value)),
        }))],
      },
      [times, ...series.map(({ values }) => values)],
      element,
    );
    const observer = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [theme, series.length]);
  useEffect(() => {
    plot.current?.setData([times, ...series.map(({ values }) => values)]);
  }, [times, series]);
  return html`<figure class="chart" role="group" aria-label=${label}><div ref=${place}></div></figure>`;
}
