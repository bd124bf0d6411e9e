// @ts-check
/** Addresses: the path chooses the page, the query is the page's state, so that both can be sent on. */
import { useCallback, useEffect, useState } from './ui.js';

export const BASE = '/console';
const changes = new EventTarget();
let moved = false;
const noteMove = () => void (moved = true);
changes.addEventListener('change', noteMove);
addEventListener('popstate', noteMove);

/** Whether the address has changed since the page was loaded. */
export const hasMoved = () => moved;

/**
 * Go to an address of the console.
 * @param {string} address
 * @param {{replace?: boolean}} options replace: no new entry in the history
 */
export function navigate(address, { replace = false } = {}) {
  if (address === location.pathname + location.search) return;
  if (replace) history.replaceState(null, '', address);
  else history.pushState(null, '', address);
  changes.dispatchEvent(new Event('change'));
}

/** The current path below the console's, and its query. */
export function useAddress() {
  const [address, setAddress] = useState(readAddress);
  useEffect(() => {
    const update = () => setAddress(readAddress());
    changes.addEventListener('change', update);
    addEventListener('popstate', update);
    return () => {
      changes.removeEventListener('change', update);
      removeEventListener('popstate', update);
    };
  }, []);
  return address;
}

function readAddress() {
  const path = location.pathname.slice(BASE.length).replace(/^\/+|\/+$/g, '');
  const parts = path === '' ? [] : path.split('/').map(decode);
  return { path: location.pathname, parts, query: new URLSearchParams(location.search) };
}

function decode(/** @type {string} */ part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/**
 * Values of the query, and a function that changes some of them in place; null removes one.
 * @returns {[URLSearchParams, (values: Record<string, string | number | null>) => void]}
 */
export function useQuery() {
  const { query } = useAddress();
  const change = useCallback((/** @type {Record<string, string | number | null>} */ values) => {
    const changed = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === '') changed.delete(name);
      else changed.set(name, String(value));
    }
    const text = changed.toString();
    navigate(location.pathname + (text ? `?${text}` : ''), { replace: true });
  }, []);
  return [query, change];
}

/** A non-negative integer of the query; null where there is none. */
export function readNumber(/** @type {URLSearchParams} */ query, /** @type {string} */ name) {
  const text = query.get(name);
  return text !== null && /^\d{1,9}$/.test(text) ? Number(text) : null;
}

/** The address of a session's page. */
export function sessionAddress(/** @type {string} */ id, page = '', query = '') {
  return `${BASE}/sessions/${encodeURIComponent(id)}${page ? `/${page}` : ''}${query}`;
}

/** Make links of the console change the page without loading it anew. */
export function followLinks() {
  document.addEventListener('click', (event) => {
    if (event.defaultPrevented || event.button !== 0) return;
    if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
    const link = event.target instanceof Element ? event.target.closest('a') : null;
    if (!link || link.target || link.origin !== location.origin || link.hasAttribute('download')) return;
    if (link.pathname !== BASE && !link.pathname.startsWith(`${BASE}/`)) return;
    if (link.hash && link.pathname === location.pathname) return;
    event.preventDefault();
    navigate(link.pathname + link.search);
  });
}
