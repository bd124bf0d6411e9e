// @ts-check
/**
 * Server-sent events over fetch: EventSource sends no key, and takes no POST.
 *
 * A browser opens six connections to a host over HTTP/1.1, so the tabs that look at the same thing
 * share one stream: the one that holds its lock reads it and passes the events on.
 */
import { getKey } from './access.js';
import { Problem, request } from './api.js';

const FIRST_WAIT_MS = 1000;
const LONGEST_WAIT_MS = 15000;

/**
 * The events of a response: name and parsed data.
 * @param {Response} response
 */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split('\n\n');
      rest = blocks.pop() ?? '';
      for (const block of blocks) {
        const event = parseBlock(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseBlock(/** @type {string} */ block) {
  let name = 'message';
  const data = [];
  for (const line of block.split('\n')) {
    if (line.startsWith('event:')) name = line.slice(6).trim();
    else if (line.startsWith('data:')) data.push(line.slice(5).trimStart());
  }
  return data.length ? { name, data: JSON.parse(data.join('\n')) } : null;
}

/**
 * Watch a stream until `close` is called, over all interruptions. Nothing is replayed: after each
 * of them there is a new `snapshot`.
 * @param {string} path
 * @param {(event: {name: string, data: any}) => void} onEvent
 * @param {(live: boolean) => void} onLive
 * @returns {() => void} close
 */
export function watch(path, onEvent, onLive) {
  const ended = new AbortController();
  if (getKey() || !navigator.locks) {
    keepReading(path, onEvent, onLive, ended.signal);
    return () => ended.abort();
  }
  const name = `kvrecall ${path}`;
  const channel = new BroadcastChannel(name);
  channel.onmessage = ({ data }) => {
    onLive(data.live);
    if (data.event) onEvent(data.event);
  };
  const pass = (/** @type {any} */ event) => {
    onEvent(event);
    channel.postMessage({ live: true, event });
  };
  const passLive = (/** @type {boolean} */ live) => {
    onLive(live);
    channel.postMessage({ live });
  };
  navigator.locks
    .request(name, { signal: ended.signal }, () => keepReading(path, pass, passLive, ended.signal))
    .catch(() => {}); // closed before the lock was free
  // A tab that only listens is live as long as the one that reads.
  navigator.locks.query().then(({ held }) => {
    if (held?.some((lock) => lock.name === name) && !ended.signal.aborted) onLive(true);
  });
  return () => {
    ended.abort();
    channel.close();
  };
}

/**
 * @param {string} path
 * @param {(event: {name: string, data: any}) => void} onEvent
 * @param {(live: boolean) => void} onLive
 * @param {AbortSignal} signal
 */
async function keepReading(path, onEvent, onLive, signal) {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      const response = await request(path, { signal, headers: { accept: 'text/event-stream' } });
      for await (const event of readEvents(response)) {
        if (signal.aborted) return;
        if (event.name === 'snapshot') {
          onLive(true);
          wait = FIRST_WAIT_MS;
        }
        onEvent(event);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem) {
        if (error.status === 404 || error.status === 401 || error.status === 403) return onLive(false);
        wait = Math.max(wait, 1000 * (error.retryAfter ?? 0));
      }
    }
    onLive(false);
    await sleep(wait, signal);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }
}

/**
 * Wait, or until the signal.
 * @param {number} milliseconds
 * @param {AbortSignal} signal
 */
export function sleep(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener('abort', () => (clearTimeout(timer), resolve(undefined)), { once: true });
  });
}
