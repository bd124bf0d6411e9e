// @ts-check
/** The committed log of a session: messages of each turn, and what the turn cost. */
import { Empty, Failure, Loaded } from '../components/basics.js';
import { Messages } from '../components/message.js';
import { Phases } from '../components/phases.js';
import { sessionPath } from '../core/api.js';
import { useBusy } from '../core/busy.js';
import { count, moment, plural, words } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { readNumber, sessionAddress, useQuery } from '../core/router.js';
import { html, useEffect, useRef } from '../core/ui.js';
import { forkAt } from './forks.js';

const SHOWN = 20;
/** @param {{session: any, version: number, readOnly: boolean}} props */
export function TurnsPage({ session, version, readOnly }) {
  const [query] = useQuery();
  const chosen = readNumber(query, 'turn');
  const newest = Math.max(0, session.turns - SHOWN);
  const after = chosen !== null ? Math.max(0, chosen - 1) : (readNumber(query, 'after') ?? newest);
  const resource = useResource(sessionPath(session.id, `/turns?after=${after}&limit=${SHOWN}`), { version });
  const address = (from) => sessionAddress(session.id, 'turns', `?after=${from}`);
  return html`<${Loaded} resource=${resource}>${({ turns, next_after: next }) => html`
    ${!turns.length && html`<${Empty}>No turn was committed yet.<//>`}
    ${turns.map((turn) => html`<${Turn} key=${turn.turn} session=${session} turn=${turn} chosen=${turn.turn === chosen} readOnly=${readOnly} />`)}
    <nav class="row" aria-label="Pages of turns">
      ${after > 0 && html`<a class="button" href=${address(Math.max(0, after - SHOWN))}>Earlier turns</a>`}
      ${next !== null && html`<a class="button" href=${address(next)}>Later turns</a>`}
    </nav>`}
  <//>`;
}

function Turn({ session, turn, chosen, readOnly }) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    if (chosen) element.current?.scrollIntoView({ block: 'start' });
  }, [chosen]);
  const where = turn.start === null ? '' : `tokens ${count(turn.start)} to ${count(turn.stop - 1)}`;
  return html`<article class="turn" ref=${element} aria-label=${`Turn ${turn.turn}`}>
    <header>
      <h2>Turn ${turn.turn}</h2>
      <span class="note">${words(turn.finish_reason)}</span>
      ${where && html`<a href=${sessionAddress(session.id, '', `?start=${turn.start}&stop=${turn.stop}`)}>${where}</a>`}
      <span class="note">${moment(turn.committed_at)}</span>
      ${turn.durable === false && html`<strong>not durable</strong>`}
      ${turn.retries > 0 && html`<strong>${turn.retries === 1 ? 'retried once' : `retried ${turn.retries} times`}</strong>`}
    </header>
    <div class="body">
      <${Messages} messages=${turn.messages} answer=${turn.answer} />
      <${Costs} turn=${turn} />
      <${MemoryThen} session=${session} turn=${turn.turn} readOnly=${readOnly} />
    </div>
  </article>`;
}

/** The way to the memory map after a turn: of the last one the session's own, of an earlier one a fork's. */
function MemoryThen({ session, turn, readOnly }) {
  const [busy, error, run] = useBusy();
  if (turn === session.turns) return html`<p class="row"><a class="button" href=${sessionAddress(session.id)}>Memory after it</a></p>`;
  if (readOnly) return null;
  return html`<p class="row middle">
      <button type="button" disabled=${busy} onClick=${() => run(() => forkAt(session, turn))}>Memory after it</button>
      <span class="note">of a fork, which stays until you delete it</span>
    </p>
    <${Failure} error=${error} />`;
}

/** Names of the APIs that turns are sent through. */
const APIS = { rest: 'REST API', grpc: 'gRPC API', openai: 'OpenAI’s API', anthropic: 'Anthropic’s API' };

/** The request that ran a turn: its ids, and who sent it. */
function Origin({ turn }) {
  const { sender } = turn;
  const parts = [
    turn.request_id && html`request <code>${turn.request_id}</code>`,
    turn.trace_id && html`trace <code>${turn.trace_id}</code>`,
    sender && `through ${APIS[sender.api] ?? sender.api}`,
    sender?.key && html`key <code>${sender.key}</code>`,
    sender?.client && html`client <code>${sender.client}</code>`,
  ].filter(Boolean);
  return parts.length > 0 && html`<p class="note">${parts.map((part, index) => [index > 0 && ' · ', part])}</p>`;
}

function Costs({ turn }) {
  const facts = [
    `${plural(turn.prompt_tokens, 'token')} in`,
    `${plural(turn.output_tokens, 'token')} out`,
    turn.prefilled_tokens !== null && `${count(turn.prefilled_tokens)} computed`,
    turn.prefill && `prefilled sparsely (density ${turn.prefill.density.toFixed(2)}, cover ${turn.prefill.cover_mean.toFixed(3)})`,
    `peak ${count(turn.memory.peak_rows)} of ${count(turn.memory.bound_rows)} rows`,
    turn.worker && `worker ${turn.worker}`,
    turn.episode && `episode ${turn.episode.episode} (similarity ${turn.episode.similarity.toFixed(2)})`,
    turn.reselections && `${plural(turn.reselections.count, 're-selection')}, ${plural(turn.reselections.rows_in, 'row')} brought back`,
    turn.retrieval && `${plural(turn.retrieval.rows, 'row')} retrieved in ${plural(turn.retrieval.steps, 'step')}`,
    turn.remembered && `${plural(turn.remembered.tokens, 'token')} of ${plural(turn.remembered.sessions.length, 'session')} remembered`,
    turn.memory.repair.repairs > 0 && `${plural(turn.memory.repair.repairs, 'repair')} before it, ${plural(turn.memory.repair.promoted, 'token')} brought back`,
  ].filter(Boolean);
  return html`
    <${Phases} taken=${turn.seconds} starts=${turn.phase_starts} />
    <p class="note">${facts.join(' · ')}</p>
    <${Origin} turn=${turn} />`;
}
