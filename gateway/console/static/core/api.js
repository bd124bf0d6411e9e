// @ts-check
/** Calls of the REST API. An error is thrown as a Problem, whatever it was. */
import { keyHeaders, noteRefusal } from './access.js';

/** An error of the API, or of the way to it: RFC 9457's members and the request's id. */
export class Problem extends Error {
  /**
   * @param {number} status 0: there was no answer
   * @param {{title?: string, detail?: string, code?: string}} members
   * @param {string} requestId
   */
  constructor(status, members, requestId) {
    super(members.detail ?? members.title ?? `HTTP ${status}`);
    this.status = status;
    this.title = members.title ?? (status ? `HTTP ${status}` : 'No answer');
    this.code = members.code ?? '';
    this.requestId = requestId;
    /** Seconds after which to try again; null: not given. */
    this.retryAfter = /** @type {number | null} */ (null);
  }
}

/**
 * Send a request and return the response, if it is a success. Throws Problem.
 * @param {string} path
 * @param {RequestInit} options
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, {
      ...options,
      headers: { ...keyHeaders(), ...options.headers },
      credentials: 'omit',
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Problem(0, { title: 'No answer', detail: 'The service cannot be reached. Is it running?' }, '');
  }
  if (response.ok) return response;
  if (response.status === 401) noteRefusal();
  throw await readProblem(response);
}

async function readProblem(/** @type {Response} */ response) {
  let members = {};
  try {
    members = await response.json();
  } catch {
    members = { title: response.statusText, detail: `The answer with status ${response.status} is no problem document.` };
  }
  const problem = new Problem(response.status, members, response.headers.get('x-request-id') ?? '');
  const after = Number(response.headers.get('retry-after'));
  if (after > 0) problem.retryAfter = after;
  return problem;
}

/**
 * @param {string} path
 * @param {{signal?: AbortSignal}} options
 */
export async function get(path, options = {}) {
  return (await request(path, options)).json();
}

/**
 * @param {string} path
 * @param {object} body
 * @param {{signal?: AbortSignal}} options
 */
export async function post(path, body, options = {}) {
  const response = await request(path, {
    ...options,
    method: 'POST',
    body: JSON.stringify(body),
    headers: { 'content-type': 'application/json' },
  });
  return response.json();
}

/** @param {string} path */
export async function remove(path) {
  await request(path, { method: 'DELETE' });
}

/** The path of a session's resource. */
export function sessionPath(/** @type {string} */ id, rest = '') {
  return `/v1/sessions/${encodeURIComponent(id)}${rest}`;
}

/**
 * A query string of the values that are set.
 * @param {Record<string, string | number | null | undefined>} values
 */
export function toQuery(values) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== '') query.set(name, String(value));
  }
  const text = query.toString();
  return text ? `?${text}` : '';
}
