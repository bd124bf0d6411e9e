// @ts-check
/** Where a fact's tokens are, and whether the session can still see them. */
import { get, sessionPath } from '../core/api.js';
import { useEffect, useState } from '../core/ui.js';

const FIRST_TOKENS = 512;

/**
 * @typedef {{start: number, stop: number, rows: number, whole: number, promoted: number}} Fact rows of its tokens
 */

/**
 * The first place of `text` in the session's first tokens, with its active and promoted rows.
 * @param {string | null} session
 * @param {string} text
 * @param {unknown} version
 * @returns {Fact | null}
 */
export function useFact(session, text, version) {
  const [fact, setFact] = useState(/** @type {{session: string, fact: Fact | null} | null} */ (null));
  useEffect(() => {
    if (session === null) return undefined;
    const ended = new AbortController();
    get(sessionPath(session, `/memory/tokens?start=0&stop=${FIRST_TOKENS}`), { signal: ended.signal }).then(
      ({ tokens }) => ended.signal.aborted || setFact({ session, fact: findFact(tokens, text) }),
      () => {}, // the map beside it shows the error
    );
    return () => ended.abort();
  }, [session, text, version]);
  return fact?.session === session ? fact.fact : null;
}

/**
 * @param {import('../map/tokens.js').Token[]} tokens
 * @param {string} text
 * @returns {Fact | null}
 */
export function findFact(tokens, text) {
  const whole = tokens.map((token) => token.text).join('');
  const from = whole.indexOf(text);
  if (from < 0) return null;
  let offset = 0;
  const own = tokens.filter((token) => {
    const begin = offset;
    offset += token.text.length;
    return offset > from && begin < from + text.length;
  });
  const bits = (masks) => masks.reduce((sum, mask) => sum + countBits(mask), 0);
  return {
    start: own[0].position,
    stop: own[own.length - 1].position + 1,
    rows: own.reduce((sum, token) => sum + token.rows, 0),
    whole: own.reduce((sum, token) => sum + token.rows_total, 0),
    promoted: own.reduce((sum, token) => sum + bits(token.promoted), 0),
  };
}

function countBits(/** @type {string} */ mask) {
  return [...BigInt(`0x${mask || '0'}`).toString(2)].filter((bit) => bit === '1').length;
}

/** A fact's state in words. */
export function describeFact(/** @type {Fact} */ { rows, whole, promoted }) {
  if (promoted > 0) return `brought back by a repair: ${rows} of ${whole} rows are active, ${promoted} of them brought back`;
  if (rows === 0) return `evicted: none of its ${whole} rows is active`;
  return rows === whole ? `active: all of its ${whole} rows` : `mostly ${2 * rows < whole ? 'evicted' : 'active'}: ${rows} of ${whole} rows are active`;
}
