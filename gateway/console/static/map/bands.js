// @ts-check
/** Bands above the map: who spoke, in which episode, and where the session paused. */
import { get, sessionPath } from '../core/api.js';
import { resolveColors, useThemeVersion } from '../core/theme.js';
import { useEffect, useMemo, useState } from '../core/ui.js';

const PAGE = 200;
const MOST_TURNS = 1000;
const PAUSES = 32;
/** Tokens at the end of a turn that may be sampled and not computed yet: the map has none of them. */
const SAMPLED = 3;

/**
 * The newest turns of a session, oldest first, at most a thousand.
 * @param {string} session
 * @param {number} total
 * @param {unknown} version
 */
export function useTurns(session, total, version) {
  const [turns, setTurns] = useState(/** @type {any[]} */ ([]));
  useEffect(() => {
    const ended = new AbortController();
    loadTurns(session, total, ended.signal).then(
      (loaded) => ended.signal.aborted || setTurns(loaded),
      () => {}, // the map goes without its bands; the page of turns shows the error
    );
    return () => ended.abort();
  }, [session, total, version]);
  return turns;
}

async function loadTurns(session, total, signal) {
  const turns = [];
  let after = /** @type {number | null} */ (Math.max(0, total - MOST_TURNS));
  while (after !== null && turns.length < MOST_TURNS) {
    const page = await get(sessionPath(session, `/turns?after=${after}&limit=${PAGE}`), { signal });
    turns.push(...page.turns);
    after = page.next_after;
  }
  return turns;
}

/** The path of a session's pauses for the bands. */
export function pausesPath(/** @type {string} */ session) {
  return sessionPath(session, `/pauses?limit=${PAUSES}`);
}

/**
 * @param {any[]} turns
 * @param {any[]} pauses
 * @returns {import('./painter.js').Band[]}
 */
export function useBands(turns, pauses) {
  const theme = useThemeVersion();
  return useMemo(() => {
    const [user, assistant, pause, text] = resolveColors(['--span-user', '--span-assistant', '--map-promoted', '--accent']);
    const known = turns.filter((turn) => turn.start !== null);
    const spans = known.flatMap((turn) =>
      turn.spans.map(({ side, start, stop }) => ({
        start, stop, color: side === 'assistant' ? assistant : user, label: `${turn.turn} ${side}`,
      })),
    );
    const bands = [{ name: 'turns', spans }];
    const episodes = known.filter((turn) => turn.episode);
    if (episodes.length) {
      bands.push({ name: 'episodes', spans: episodes.map((turn) => ({ start: turn.start, stop: turn.stop, color: text, label: turn.episode.episode })) });
    }
    const paused = new Set(pauses.map((each) => each.turn));
    const ends = known.filter((turn) => paused.has(turn.turn));
    if (ends.length) {
      bands.push({ name: 'pauses', spans: ends.map((turn) => ({ start: Math.max(turn.start, turn.stop - SAMPLED), stop: turn.stop, color: pause, label: '' })) });
    }
    return bands;
  }, [turns, pauses, theme]);
}
