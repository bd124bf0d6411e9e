// @ts-check
/** What the playground asks of the API: sessions, streamed turns, events of tool calls. */
import { Problem, get, post, remove, request, sessionPath } from '../core/api.js';
import { readEvents } from '../core/events.js';

/**
 * Send a turn and report its progress. Returns the committed turn; throws Problem.
 * @param {string} session
 * @param {object} body
 * @param {(event: {name: string, data: any}) => void} onEvent
 */
export async function streamTurn(session, body, onEvent = () => {}) {
  const response = await request(sessionPath(session, '/turns'), {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify({ ...body, stream: true }),
  });
  const requestId = response.headers.get('x-request-id') ?? '';
  for await (const event of readEvents(response)) {
    if (event.name === 'error') throw new Problem(event.data.status, event.data, requestId);
    onEvent(event);
    if (event.name === 'done') return event.data;
  }
  throw new Problem(0, { title: 'The stream ended', detail: 'The turn’s stream ended before the turn; look at the session’s turns.' }, requestId);
}

/** Create a session. */
export function createSession(/** @type {object} */ settings) {
  return post('/v1/sessions', settings);
}

/** Delete a session, if it is still there. */
export async function deleteSession(/** @type {string} */ session) {
  await remove(sessionPath(session)).catch((error) => {
    if (error.status !== 404) throw error;
  });
}

/** Report an event of a tool call. */
export function sendEvent(/** @type {string} */ session, /** @type {object} */ event) {
  return post(sessionPath(session, '/events'), event);
}

/**
 * Run the same turn with the full cache. Calls that it waits for get `results` in their order: its
 * own answer may have called what the other session's did not.
 * @param {string} session
 * @param {object} body
 * @param {string[]} results
 */
export async function compareTurn(session, body, results) {
  const { pending_calls: calls } = await get(sessionPath(session));
  const waiting = calls.filter(({ status }) => status === 'pending');
  for (const [index, call] of waiting.entries()) {
    const result = results[index] ?? results.at(-1) ?? '{"error": "not run"}';
    await sendEvent(session, { type: 'tool_call.completed', call_id: call.id, result });
  }
  return post(sessionPath(session, '/turns'), body);
}
