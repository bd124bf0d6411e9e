// @ts-check
/** What the map's colours and patterns mean. */
import { html } from '../core/ui.js';

export function Legend() {
  const swatch = (color) => html`<span class="swatch" style=${{ background: `var(${color})` }}></span>`;
  return html`<ul class="legend">
    <li>${swatch('--map-active')}active: the stronger the colour, the larger the share</li>
    <li>${swatch('--map-promoted')}brought back by a repair</li>
    <li>${swatch('--map-empty')}evicted: in the row store only</li>
    <li><span class="swatch hatched"></span>protected: first and newest tokens, the last turn</li>
  </ul>`;
}
