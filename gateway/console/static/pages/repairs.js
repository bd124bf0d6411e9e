// @ts-check
/** Repairs of a session: a lane per pause with its calls and repairs, and a table of all. */
import { Empty, Loaded, Table } from '../components/basics.js';
import { Lane, toLanes } from '../components/lane.js';
import { sessionPath } from '../core/api.js';
import { bytes, count, moment, percent, plural, seconds, shorten, words } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { readNumber, sessionAddress, useQuery } from '../core/router.js';
import { html, useMemo } from '../core/ui.js';

const PAUSES = 10;
const REPAIRS = 32;

/** @param {{session: any, version: number}} props */
export function RepairsPage({ session, version }) {
  const [query] = useQuery();
  const chosen = readNumber(query, 'repair');
  const repairs = useResource(sessionPath(session.id, `/repairs?limit=${REPAIRS}`), { version });
  const pauses = useResource(sessionPath(session.id, `/pauses?limit=${PAUSES}`), { version });
  return html`
    <section aria-label="Timeline">
      <h2>Pauses, newest first</h2>
      <${Loaded} resource=${pauses}>${(data) => html`<${Lanes} pauses=${data.pauses} repairs=${repairs.data?.repairs ?? []} chosen=${chosen} />`}<//>
    </section>
    <section aria-label="Repairs">
      <${Loaded} resource=${repairs}>${(data) => html`<${Repairs} session=${session} repairs=${data.repairs} chosen=${chosen} />`}<//>
    </section>`;
}

function Lanes({ pauses, repairs, chosen }) {
  const lanes = useMemo(() => toLanes(pauses, repairs), [pauses, repairs]);
  if (!lanes.length) {
    return html`<${Empty}>No pause and no repair yet. A pause begins when the model calls a tool; repairs run in it.<//>`;
  }
  return html`
    <ul class="legend">
      <li><span class="swatch" style=${{ background: 'var(--span-user)' }}></span>tool call, to its result</li>
      <li><span class="swatch" style=${{ background: 'var(--map-promoted)' }}></span>repair that brought tokens back</li>
      <li><span class="swatch" style=${{ background: 'var(--map-active)' }}></span>repair that brought none back</li>
      <li>dashed: cut short by a turn or a deadline</li>
    </ul>
    ${lanes.map((lane) => html`<${Lane} key=${lane.title} lane=${lane} chosen=${chosen} />`)}`;
}

function outcome(repair) {
  if (repair.truncated) return `cut short, ${percent(repair.share_scanned)} of the candidates scored`;
  return repair.in_pause ? 'ended in the pause' : 'ended';
}

function Repairs({ session, repairs, chosen }) {
  const columns = [
    { name: 'Repair', value: (repair) => html`${repair.number === chosen ? html`<strong>${repair.number} (chosen)</strong>` : repair.number}` },
    { name: 'For turn', number: true, value: (repair) => html`<a href=${sessionAddress(session.id, 'turns', `?turn=${repair.turn}`)}>${repair.turn}</a>` },
    { name: 'Trigger', value: (repair) => words(repair.trigger) },
    { name: 'Signal', wide: true, value: (repair) => html`<span class="passage">${shorten(repair.signal, 160)}</span>` },
    { name: 'Candidates', number: true, value: (repair) => count(repair.candidates) },
    { name: 'Scored', number: true, value: (repair) => count(repair.scored_rows) },
    { name: 'Brought back', number: true, value: (repair) => count(repair.promoted) },
    { name: 'Demoted', number: true, value: (repair) => count(repair.demoted) },
    { name: 'Time', number: true, value: (repair) => seconds(repair.seconds) },
    { name: 'Read', number: true, value: (repair) => bytes(repair.bytes_read) },
    { name: 'Outcome', value: outcome },
    { name: 'At', value: (repair) => moment(repair.at) },
  ];
  const passages = repairs.filter((repair) => repair.passages.length);
  return html`
    <${Table} caption="The last repairs, newest first" columns=${columns} rows=${repairs} id=${(repair) => repair.number}
      empty="No repair was committed yet." />
    ${passages.length > 0 && html`<h2>What they brought back</h2>`}
    ${passages.map((repair, index) => html`<details key=${repair.number} class="panel" open=${index === 0 || repair.number === chosen}>
      <summary>Repair ${repair.number}, ${words(repair.trigger)}: ${plural(repair.passages.length, 'passage')}</summary>
      ${repair.passages.map((passage) => html`<p key=${passage.start} class="passage">
        <a href=${sessionAddress(session.id, '', `?token=${passage.start}&why=${passage.start}`)}>tokens ${passage.start}–${passage.stop - 1}</a>
        ${' '}${passage.before}<mark class="promoted">${passage.promoted}</mark>${passage.after}</p>`)}
    </details>`)}`;
}
