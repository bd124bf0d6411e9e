// @ts-check
/** Tokens of the API: which layers and heads hold one. */

/**
 * @typedef {{position: number, id: number, text: string, turn: number | null, side: string | null, held: string[],
 *   promoted: string[], rows: number, rows_total: number, reason: string, detail: string, repair: number | null,
 *   repairs: number[], score: number | null}} Token
 */

const PINNED = new Set(['sink', 'recent', 'turn']);

/** Whether the mask of a layer has a head. A mask is a hexadecimal number, its lowest bit is head 0. */
export function hasHead(/** @type {string} */ mask, /** @type {number} */ head) {
  return ((BigInt(`0x${mask || '0'}`) >> BigInt(head)) & 1n) === 1n;
}

/**
 * How a token is shown: the share of layers and heads that hold it (0 to 100), and its classes.
 * @param {Token} token
 * @param {number | null} head one head, or all
 */
export function lookOf(token, head) {
  let share = token.rows_total ? (100 * token.rows) / token.rows_total : 0;
  let promoted = token.promoted.some((mask) => mask !== '0');
  if (head !== null) {
    const holds = token.held.filter((mask) => hasHead(mask, head)).length;
    share = token.held.length ? (100 * holds) / token.held.length : 0;
    promoted = token.promoted.some((mask) => hasHead(mask, head));
  }
  const classes = ['tk'];
  if (token.reason === 'pending') classes.push('pending');
  else if (share === 0) classes.push('evicted');
  if (promoted) classes.push('promoted');
  if (PINNED.has(token.reason)) classes.push('pinned');
  return { share, classes };
}
