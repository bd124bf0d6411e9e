// @ts-check
/** Loaded data of components: what an address answers, loaded again when asked to. */
import { onAccess } from './access.js';
import { get } from './api.js';
import { watch } from './events.js';
import { useCallback, useEffect, useRef, useState } from './ui.js';

/** Beside the stream, which knows little of other gateways. */
const POLL_MS = 30000;

/**
 * The JSON at `path`, kept while it is loaded again, and the time at which it was loaded. null: nothing is loaded.
 * @param {string | null} path
 * @param {{version?: unknown, every?: number}} options version: loaded again when it changes
 */
export function useResource(path, { version = 0, every = POLL_MS } = {}) {
  const [state, setState] = useState({ path, data: /** @type {any} */ (null), error: /** @type {any} */ (null), loadedAt: /** @type {Date | null} */ (null) });
  const [asked, setAsked] = useState(0);
  const reload = useCallback(() => setAsked((count) => count + 1), []);
  useEffect(() => {
    if (path === null) return undefined;
    const ended = new AbortController();
    get(path, { signal: ended.signal }).then(
      (data) => ended.signal.aborted || setState({ path, data, error: null, loadedAt: new Date() }),
      (error) =>
        ended.signal.aborted ||
        setState((before) => (before.path === path ? { ...before, error } : { path, data: null, error, loadedAt: null })),
    );
    return () => ended.abort();
  }, [path, version, asked]);
  useEffect(() => {
    const timer = setInterval(reload, every);
    const forget = onAccess('change', reload);
    return () => {
      clearInterval(timer);
      forget();
    };
  }, [every]);
  const own = state.path === path;
  return { data: own ? state.data : null, error: own ? state.error : null, loadedAt: own ? state.loadedAt : null, reload };
}

/**
 * Follow a stream. `onEvent` may change from call to call.
 * @param {string | null} path
 * @param {(event: {name: string, data: any}) => void} onEvent
 * @returns {boolean} whether events arrive
 */
export function useStream(path, onEvent) {
  const [live, setLive] = useState(false);
  const [access, setAccess] = useState(0);
  const handler = useRef(onEvent);
  handler.current = onEvent;
  useEffect(() => onAccess('change', () => setAccess((count) => count + 1)), []);
  useEffect(() => {
    if (path === null) return undefined;
    const close = watch(path, (event) => handler.current(event), setLive);
    return () => {
      close();
      setLive(false);
    };
  }, [path, access]);
  return live;
}

/**
 * A counter that follows calls of `bump`, at most every `milliseconds`, so that a burst of events
 * loads once.
 * @returns {[number, () => void]}
 */
export function useCounter(milliseconds = 150) {
  const [count, setCount] = useState(0);
  const timer = useRef(0);
  const bump = useCallback(() => {
    if (timer.current) return;
    timer.current = setTimeout(() => {
      timer.current = 0;
      setCount((before) => before + 1);
    }, milliseconds);
  }, [milliseconds]);
  useEffect(() => () => clearTimeout(timer.current), []);
  return [count, bump];
}
