// @ts-check
/** Episodes of a session by size, and the turns that went to each. */
import { Bar, Empty, Figures, Loaded, Table } from '../components/basics.js';
import { sessionPath } from '../core/api.js';
import { count, shorten } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { sessionAddress } from '../core/router.js';
import { html } from '../core/ui.js';

const TURNS = 50;

/** @param {{session: any, version: number}} props */
export function EpisodesPage({ session, version }) {
  const episodes = useResource(sessionPath(session.id, '/episodes'), { version });
  const after = Math.max(0, session.turns - TURNS);
  const turns = useResource(sessionPath(session.id, `/turns?after=${after}&limit=${TURNS}`), { version });
  return html`<${Loaded} resource=${episodes}>${(data) =>
    data.settings === null
      ? html`<${Empty}>This session has no episodes: the method <code>epicache</code> keeps a selection of rows per topic.<//>`
      : html`<${Episodes} session=${session} data=${data} turns=${turns.data?.turns ?? []} />`}
  <//>`;
}

function Episodes({ session, data, turns }) {
  const largest = Math.max(1, ...data.episodes.map(({ tokens }) => tokens));
  const rows = [...data.episodes].sort((one, other) => other.tokens - one.tokens);
  const columns = [
    { name: 'Episode', value: (row) => html`${row.id}${row.active ? html` <strong>(active)</strong>` : ''}` },
    { name: 'Size', value: (row) => html`<${Bar} total=${largest} text=${`${row.tokens} tokens`} parts=${[{ name: row.id, value: row.tokens, color: 'var(--map-active)' }]} />` },
    { name: 'Tokens', number: true, value: (row) => count(row.tokens) },
    { name: 'Segments', number: true, value: (row) => count(row.segments) },
    { name: 'Turns', number: true, value: (row) => count(row.matched) },
    { name: 'Its middle says', wide: true, value: (row) => html`<span class="passage">${shorten(row.medoid, 240)}</span>` },
  ];
  const matched = turns.filter((turn) => turn.episode).reverse();
  const turnColumns = [
    { name: 'Turn', value: (turn) => html`<a href=${sessionAddress(session.id, 'turns', `?turn=${turn.turn}`)}>${turn.turn}</a>` },
    { name: 'Episode', value: (turn) => turn.episode.episode },
    { name: 'Similarity', number: true, value: (turn) => turn.episode.similarity.toFixed(3) },
    { name: 'Switched', value: (turn) => (turn.episode.switched ? 'yes' : 'no') },
    { name: 'Rows loaded', number: true, value: (turn) => count(turn.episode.rows_moved) },
    { name: 'Rows kept', number: true, value: (turn) => count(turn.episode.rows_kept) },
  ];
  return html`
    <${Figures} items=${[
      ['Wanted', String(data.settings.count)], ['Segments', count(data.segments), `${count(data.built_segments)} of them built`],
      ['Builds', count(data.builds)], ['Built', data.settings.build.replaceAll('_', ' ')],
    ]} />
    <${Table} caption="Episodes, the largest first" columns=${columns} rows=${rows} id=${(row) => row.id}
      empty="No episodes yet: they are built while the session is idle, once it is longer than its budget." />
    <${Table} caption="The last turns and their episodes" columns=${turnColumns} rows=${matched} id=${(turn) => turn.turn}
      empty="No turn went to an episode yet." />`;
}
