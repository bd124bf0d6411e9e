// @ts-check
/** The conversation's text, token by token, of which only what is near the view is loaded. */
import { sessionPath } from '../core/api.js';
import { useResource } from '../core/resource.js';
import { html, useEffect, useMemo, useRef, useState } from '../core/ui.js';
import { lookOf } from './tokens.js';

const CHUNK = 256;
/** Before any chunk is loaded; afterwards the others are taken to be as high as those on average. */
const ESTIMATED_HEIGHT = 420;
const AHEAD = '800px 0px';

/**
 * @param {{session: string, length: number, version: unknown, head: number | null, cursor: number | null,
 *   onCursor: (position: number) => void, onOpen: (position: number) => void}} props
 */
export function TokenText({ session, length, version, head, cursor, onCursor, onOpen }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const [near, setNear] = useState(/** @type {ReadonlySet<number>} */ (new Set([0])));
  const heights = useRef(/** @type {Map<number, number>} */ (new Map()));
  const chunks = Math.ceil(length / CHUNK);
  const known = [...heights.current.values()];
  const usual = known.length ? known.reduce((sum, height) => sum + height, 0) / known.length : ESTIMATED_HEIGHT;

  useEffect(() => {
    const root = /** @type {HTMLDivElement} */ (box.current);
    const observer = new IntersectionObserver(
      (entries) =>
        setNear((before) => {
          const after = new Set(before);
          for (const entry of entries) {
            const index = Number(/** @type {HTMLElement} */ (entry.target).dataset.chunk);
            if (entry.isIntersecting) after.add(index);
            else after.delete(index);
          }
          return after;
        }),
      { root, rootMargin: AHEAD },
    );
    for (const element of root.children) observer.observe(element);
    return () => observer.disconnect();
  }, [chunks, session]);

  useEffect(() => {
    if (cursor === null || !box.current) return;
    const chunk = box.current.children[Math.floor(cursor / CHUNK)];
    if (chunk instanceof HTMLElement && !chunk.querySelector('.tk')) box.current.scrollTop = chunk.offsetTop;
    else reveal(box.current, cursor);
  }, [cursor, chunks]);

  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) onCursor(Math.max(0, Math.min(length - 1, (cursor ?? (move < 0 ? 1 : -1)) + move)));
    else if (event.key === 'Enter' && cursor !== null) onOpen(cursor);
    else return;
    event.preventDefault();
  };
  const onClick = (/** @type {MouseEvent} */ event) => {
    const token = /** @type {HTMLElement} */ (event.target).closest('.tk');
    if (!(token instanceof HTMLElement)) return;
    const position = Number(token.dataset.position);
    onCursor(position);
    onOpen(position);
  };
  return html`<div ref=${box} class="tokens" tabindex="0" role="region" aria-describedby="text-keys"
      aria-label="Conversation, token by token" onKeyDown=${onKeyDown} onClick=${onClick}>
      ${Array.from({ length: chunks }, (_, index) =>
        html`<div key=${index} data-chunk=${index} class="chunk"
          style=${near.has(index) ? {} : { height: `${heights.current.get(index) ?? usual}px` }}>
          <div class="from">${index * CHUNK}</div>
          ${near.has(index)
            ? html`<${Chunk} session=${session} start=${index * CHUNK} version=${version} head=${head} box=${box}
                cursor=${cursor !== null && Math.floor(cursor / CHUNK) === index ? cursor : null}
                last=${index === chunks - 1} onHeight=${(height) => heights.current.set(index, height)} />`
            : html`<div class="text"></div>`}
        </div>`,
      )}
    </div>
    <p class="note" id="text-keys">Left and right arrows move from token to token, Enter says why one is active or evicted.</p>`;
}

function Chunk({ session, start, version, head, box, cursor, last, onHeight }) {
  // The last one has what was sampled and not computed yet, too.
  const stop = last ? start + 2 * CHUNK : start + CHUNK;
  const { data, error } = useResource(sessionPath(session, `/memory/tokens?start=${start}&stop=${stop}`), { version });
  const text = useRef(/** @type {HTMLDivElement | null} */ (null));
  useEffect(() => {
    if (!data || !text.current) return;
    onHeight(text.current.offsetHeight + 1);
    if (cursor !== null) reveal(box.current, cursor);
  }, [data, cursor]);
  const looks = useMemo(() => data?.tokens.map((token) => lookOf(token, head)) ?? [], [data, head]);
  if (!data) return html`<div ref=${text} class="text note">${error ? error.message : 'Loading…'}</div>`;
  return html`<div ref=${text} class="text">
    ${data.tokens.map((token, index) => {
      const { share, classes } = looks[index];
      return html`<span key=${token.position} data-position=${token.position} style=${{ '--share': Math.round(share) }}
        class=${`${classes.join(' ')}${token.position === cursor ? ' cursor' : ''}`}>${token.text}</span>`;
    })}
  </div>`;
}

/** Scroll the box, and only the box, so that a token is in it. */
function reveal(/** @type {HTMLElement | null} */ box, /** @type {number} */ position) {
  const token = box?.querySelector(`[data-position="${position}"]`);
  if (!box || !(token instanceof HTMLElement)) return;
  const top = token.offsetTop;
  if (top < box.scrollTop || top + token.offsetHeight > box.scrollTop + box.clientHeight) {
    box.scrollTop = top - box.clientHeight / 3;
  }
}
