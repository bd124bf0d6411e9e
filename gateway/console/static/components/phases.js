// @ts-check
/** The phases of a turn as a bar and a list. */
import { seconds, words } from '../core/format.js';
import { html } from '../core/ui.js';
import { Bar } from './basics.js';

/** The phases in the order of time, as kvrecall/domain/phases.py has them; styles/phases.css has their colours. */
const PHASES = [
  'waiting', 'match', 'find', 'queued', 'rewrite', 'settle', 'switch', 'repair', 'share', 'remember', 'prefill', 'append',
  'first_token', 'decode', 'evict', 'flush',
];
const OTHER_COLOR = 'var(--text)';

/**
 * The phases that took time, in the order of time: a bar of them reads like the turn. Unknown ones are at the end.
 * @param {Record<string, number>} taken seconds by phase
 * @returns {Array<[string, number]>}
 */
function sortPhases(taken) {
  const place = (/** @type {string} */ name) => (PHASES.includes(name) ? PHASES.indexOf(name) : PHASES.length);
  return Object.entries(taken)
    .filter(([, value]) => value > 0)
    .sort(([one], [other]) => place(one) - place(other));
}

/**
 * What a turn's time was spent on.
 * @param {{taken: Record<string, number>, starts: Record<string, number>}} props seconds by phase, and to their beginnings
 */
export function Phases({ taken, starts }) {
  const phases = sortPhases(taken);
  if (!phases.length) return null;
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  const color = (/** @type {string} */ name) => (PHASES.includes(name) ? `var(--phase-${name})` : OTHER_COLOR);
  const text = phases.map(([name, value]) => `${words(name)} ${seconds(value)}`).join(', ');
  return html`<${Bar} total=${total} text=${`${seconds(total)}: ${text}`}
      parts=${phases.map(([name, value]) => ({ name, value, color: color(name) }))} />
    <ul class="legend">${phases.map(([name, value]) => html`<li key=${name}>
      <span class="swatch" style=${{ background: color(name) }}></span>${words(name)} ${seconds(value)}${
        starts[name] > 0 && html` <small>after ${seconds(starts[name])}</small>`}</li>`)}</ul>`;
}
