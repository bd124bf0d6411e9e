// @ts-check
/** The API key: in this tab's sessionStorage only, and gone with the tab. */

const STORED = 'kvrecall.key';
const changes = new EventTarget();
let refused = false;

/** @returns {string} the key, empty where there is none */
export function getKey() {
  return sessionStorage.getItem(STORED) ?? '';
}

/** @param {string} key empty: forget it */
export function setKey(key) {
  if (key) sessionStorage.setItem(STORED, key);
  else sessionStorage.removeItem(STORED);
  refused = false;
  changes.dispatchEvent(new Event('change'));
}

/** The headers that authenticate a request. */
export function keyHeaders() {
  const key = getKey();
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Note that the service wants a key, or another one. */
export function noteRefusal() {
  if (refused) return;
  refused = true;
  changes.dispatchEvent(new Event('refused'));
}

/**
 * Call `listener` when the key changes, or is refused for the first time.
 * @param {'change' | 'refused'} what
 * @param {() => void} listener
 */
export function onAccess(what, listener) {
  changes.addEventListener(what, listener);
  return () => changes.removeEventListener(what, listener);
}
