// @ts-check
/** Small parts that every page has. */
import { Problem } from '../core/api.js';
import { clock } from '../core/format.js';
import { hasMoved } from '../core/router.js';
import { html, useEffect, useRef } from '../core/ui.js';

/** The heading of a page: its title in the window, and the focus after a change of page. */
export function PageHead({ title, children = null }) {
  const heading = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    document.title = `${title} · kvrecall`;
  }, [title]);
  useEffect(() => {
    if (hasMoved()) heading.current?.focus();
  }, []);
  return html`<div class="page-head"><h1 ref=${heading} tabindex="-1">${title}</h1>${children}</div>`;
}

/** An error: what was wrong, its code and the request's id. */
export function Failure({ error, retry = null }) {
  if (!error) return null;
  const known = error instanceof Problem;
  return html`<div class="problem" role="alert">
    <p><strong>${known ? error.title : 'Error of the console'}</strong>: ${error.message}</p>
    ${known &&
    html`<p class="meta">
      ${error.code && html`code <code>${error.code}</code>`}
      ${error.requestId && html` · request <code>${error.requestId}</code>`}
    </p>`}
    ${retry && html`<p><button type="button" onClick=${retry}>Try again</button></p>`}
  </div>`;
}

/**
 * How current a page is: by its stream, by its interval, or from before the connection was lost, with the
 * time of what is shown. A stream that ends loads anew at once, which finds out.
 * @param {{live: boolean, resource: any, every?: number}} props
 */
export function Freshness({ live, resource, every = 30 }) {
  const { error, loadedAt, reload } = resource;
  const was = useRef(false);
  useEffect(() => {
    if (was.current && !live) reload();
    was.current = live;
  }, [live]);
  const lost = error instanceof Problem && error.status === 0;
  if (!lost) return html`<span class="note" role="status">${live ? 'live' : `updated every ${every} s`}</span>`;
  return html`<strong class="lost" role="status">connection lost${loadedAt && `; shown is the state of ${clock(loadedAt)}`}</strong>`;
}

/** What is shown of a resource: its error, that it is loaded, or its content. */
export function Loaded({ resource, children }) {
  const { data, error, reload } = resource;
  return html`<${Failure} error=${error} retry=${reload} />
    ${data !== null ? children(data) : !error && html`<p class="note" role="status">Loading…</p>`}`;
}

export function Empty({ children }) {
  return html`<div class="empty"><p>${children}</p></div>`;
}

/** A session's state, by shape and text. */
export function State({ state }) {
  return html`<span class=${`state ${state}`}>${state}</span>`;
}

/**
 * Names with values, and a remark to some; what is false or null is left out.
 * @param {{items: any[]}} props
 */
export function Figures({ items }) {
  return html`<dl class="figures">
    ${items.filter(Boolean).map(
      ([name, value, remark]) =>
        html`<div key=${name}><dt>${name}</dt><dd>${value}${remark && html` <small>${remark}</small>`}</dd></div>`,
    )}
  </dl>`;
}

/**
 * A table that scrolls by itself, by keyboard too.
 * @param {{caption: string, columns: Array<{name: string, number?: boolean, wide?: boolean, value: (row: any) => any}>,
 *   rows: any[], id: (row: any) => string | number, empty?: string}} props
 */
export function Table({ caption, columns, rows, id, empty = 'Nothing here.' }) {
  if (!rows.length) return html`<${Empty}>${empty}<//>`;
  const kind = (column) => (column.number ? 'number' : column.wide ? 'wide' : '');
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption>${caption}</caption>
      <thead><tr>${columns.map((column) => html`<th key=${column.name} scope="col" class=${kind(column)}>${column.name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${id(row)}>
            ${columns.map((column, index) =>
              index === 0
                ? html`<th scope="row" class=${kind(column)}>${column.value(row)}</th>`
                : html`<td class=${kind(column)}>${column.value(row)}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/**
 * Shares of a whole as a bar; the text beside it says the same.
 * @param {{parts: Array<{name: string, value: number, color: string}>, total: number, text: string}} props
 */
export function Bar({ parts, total, text }) {
  const share = (value) => `${total > 0 ? (100 * value) / total : 0}%`;
  return html`<div class="bar" role="img" aria-label=${text}>
    ${parts.map(({ name, value, color }) => html`<span key=${name} class="eases" style=${{ width: share(value), background: color }}></span>`)}
  </div>`;
}

/**
 * A question before something is done.
 * @param {{open: boolean, title: string, children: any, onClose: () => void}} props
 */
export function Dialog({ open, title, children, onClose }) {
  const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    if (open && !dialog.current?.open) dialog.current?.showModal();
    if (!open && dialog.current?.open) dialog.current.close();
  }, [open]);
  return html`<dialog ref=${dialog} aria-label=${title} onClose=${onClose}>
    ${open && html`<h2>${title}</h2>${children}`}
  </dialog>`;
}
