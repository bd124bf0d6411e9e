// @ts-check
/** What the map shows as a table of runs: for screen readers, and for all who prefer numbers. */
import { html, useMemo } from '../core/ui.js';
import { describeRun, findRuns } from './cells.js';

const SHOWN = 200;

/**
 * @param {{cells: import('./cells.js').Cells, onShow: (position: number) => void}} props
 */
export function RunsTable({ cells, onShow }) {
  const runs = useMemo(() => findRuns(cells), [cells]);
  if (!runs.length) return null;
  const more = runs.length - SHOWN;
  return html`<details class="panel">
    <summary>The map as a table: ${runs.length} runs of tokens</summary>
    <div class="scroll" tabindex="0" role="region" aria-label="Runs of tokens">
      <table>
        <caption>Runs of tokens ${cells.start} to ${cells.stop - 1}</caption>
        <thead><tr><th scope="col">Tokens</th><th scope="col" class="number">Number</th><th scope="col">State</th></tr></thead>
        <tbody>
          ${runs.slice(0, SHOWN).map(
            (run) => html`<tr key=${run.start}>
              <th scope="row">
                <button type="button" onClick=${() => onShow(run.start)}>
                  ${run.stop - run.start === 1 ? `token ${run.start}` : `tokens ${run.start}–${run.stop - 1}`}
                </button>
              </th>
              <td class="number">${run.stop - run.start}</td>
              <td>${describeRun(run)}</td>
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    ${more > 0 && html`<p class="note">${more} more runs: zoom in to see them.</p>`}
  </details>`;
}
