// @ts-check
/** The frame of a session's pages: its heading, state and tabs, and the one stream that they share. */
import { Failure, Figures, Freshness, PageHead, State } from '../components/basics.js';
import { sessionPath } from '../core/api.js';
import { count, moment, plural, shorten } from '../core/format.js';
import { useCounter, useResource, useStream } from '../core/resource.js';
import { sessionAddress } from '../core/router.js';
import { html, useState } from '../core/ui.js';
import { EpisodesPage } from './episodes.js';
import { ForksPage } from './forks.js';
import { MemoryPage } from './memory.js';
import { RepairsPage } from './repairs.js';
import { SessionActions } from './session-actions.js';
import { TurnsPage } from './turns.js';

/** Pages by the last part of their address. */
const TABS = {
  '': ['Memory', MemoryPage],
  turns: ['Turns', TurnsPage],
  repairs: ['Repairs', RepairsPage],
  episodes: ['Episodes', EpisodesPage],
  forks: ['Forks', ForksPage],
};

/** Most characters of a session's name in a heading. */
const NAME_LENGTH = 80;

/** @param {string} page */
export function isSessionPage(page) {
  return Object.hasOwn(TABS, page);
}

/** @param {{id: string, page: string, readOnly: boolean}} props */
export function SessionFrame({ id, page, readOnly }) {
  const { session, version, live, gone, resource } = useSession(id);
  const { error, reload } = resource;
  const [title, Page] = TABS[page];
  const name = session?.metadata.name;
  return html`
    <${PageHead} title=${`${title} of ${name ? shorten(name, NAME_LENGTH) : id}`} key=${page}>
      ${name && html`<code class="note">${id}</code>`}
      ${session && html`<${State} state=${session.state} />`}
      ${session && html`<${Freshness} live=${live} resource=${resource} />`}
      ${session && html`<${SessionActions} session=${session} readOnly=${readOnly} />`}
    <//>
    ${gone && html`<div class="problem" role="alert"><p>The session was deleted.</p></div>`}
    <${Failure} error=${error} retry=${reload} />
    ${session && html`
      <${Facts} session=${session} />
      <nav class="tabs" aria-label="Session">
        <ul>${Object.entries(TABS).map(([name, [label]]) => html`<li key=${name}>
          <a href=${sessionAddress(id, name)} aria-current=${name === page ? 'page' : null}>${label}</a></li>`)}</ul>
      </nav>
      <${Page} session=${session} version=${version} live=${live} readOnly=${readOnly} />`}`;
}

/**
 * A session with its live state, and a counter that changes when anything of it was committed.
 * @param {string | null} id
 */
export function useSession(id) {
  const [version, bump] = useCounter();
  const [state, setState] = useState(/** @type {{id: string, state: string} | null} */ (null));
  const [gone, setGone] = useState(/** @type {string | null} */ (null));
  const resource = useResource(id === null ? null : sessionPath(id), { version });
  const live = useStream(id === null ? null : sessionPath(id, '/stream'), ({ name, data }) => {
    if (name === 'snapshot' || name === 'state') setState({ id: data.session, state: data.state });
    if (name === 'deleted') return setGone(data.session);
    // A turn or a repair that begins commits nothing.
    if (name !== 'state' && data.status !== 'started') bump();
    return undefined;
  });
  const session = resource.data && live && state?.id === id ? { ...resource.data, state: state.state } : resource.data;
  return { session, version, live, gone: gone !== null && gone === id, resource };
}

function Facts({ session }) {
  const { forked_from: origin } = session;
  const metadata = Object.entries(session.metadata).map(([key, value]) => `${key}: ${value}`);
  return html`<${Figures} items=${[
    metadata.length > 0 && ['Metadata', metadata.join(', ')],
    ['Recall', session.recall ? 'on' : 'off', `method ${session.research.method}`],
    ['Length', count(session.length), 'tokens'],
    ['Turns', count(session.turns)],
    ['Durable', session.durable === null ? 'not known' : session.durable ? 'yes' : 'no', session.durable === false ? 'rows in memory only' : ''],
    ['Worker', session.worker || '–'],
    ['Updated', moment(session.updated_at)],
    origin && ['Fork of', html`<a href=${sessionAddress(origin.session)}>${origin.session}</a>`, `at turn ${origin.turn}`],
    session.pending_calls.length > 0 && ['Waits for', plural(session.pending_calls.length, 'tool call'), session.pending_calls.map(({ name }) => name).join(', ')],
  ]} />`;
}
