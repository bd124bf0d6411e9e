// @ts-check
/** A lane of the repairs' timeline: one pause, its calls above its repairs, on an axis of seconds. */
import { instant, moment, plural, seconds, words } from '../core/format.js';
import { html, useLayoutEffect, useRef, useState } from '../core/ui.js';

const NARROWEST = 420;
const LABELS = 150;
const ROW = 24;
const TOP = 22;

/**
 * @typedef {{kind: 'call' | 'repair', label: string, from: number, to: number, open: boolean, classes: string, text: string, number: number | null}} Stripe
 * @typedef {{title: string, note: string, from: number, to: number, stripes: Stripe[]}} LaneView
 */

/**
 * Lanes of pauses, and of the turns whose repairs belong to none, newest first.
 * @param {any[]} pauses
 * @param {any[]} repairs
 * @returns {LaneView[]}
 */
export function toLanes(pauses, repairs) {
  const inPauses = new Set(pauses.flatMap((pause) => pause.repairs.map((repair) => repair.number)));
  const others = Map.groupBy(repairs.filter((repair) => !inPauses.has(repair.number)), (repair) => repair.turn);
  const lanes = [
    ...pauses.map((pause) => ({ turn: pause.turn + 0.5, lane: toLane(`After turn ${pause.turn}`, pause, pause.repairs) })),
    ...[...others].map(([turn, own]) => ({ turn, lane: toLane(`For turn ${turn}, outside of pauses`, null, own) })),
  ];
  return lanes.sort((one, other) => other.turn - one.turn).map(({ lane }) => lane);
}

function toLane(title, pause, repairs) {
  const stripes = [
    ...(pause?.calls ?? []).map((call) => toCallStripe(call, pause)),
    ...[...repairs].sort((one, other) => one.number - other.number).map(toRepairStripe),
  ];
  const times = stripes.flatMap(({ from, to }) => [from, to]).filter(Number.isFinite);
  const began = instant(pause?.began_at);
  const from = Math.min(...times, ...(began === null ? [] : [began]));
  const to = Math.max(...times, from + 1);
  const note = pause ? (pause.open ? 'lasts' : pause.ended_at ? `ended ${moment(pause.ended_at)}` : 'ended') : '';
  return { title, note, from, to, stripes: stripes.map((stripe) => ({ ...stripe, to: stripe.open ? to : stripe.to })) };
}

function toCallStripe(call, pause) {
  const from = instant(call.started_at) ?? instant(call.called_at) ?? instant(pause.began_at) ?? instant(call.last_event_at) ?? NaN;
  const ended = instant(call.ended_at);
  const to = ended ?? instant(call.last_event_at) ?? from;
  const pieces = call.output_pieces ? `, ${plural(call.output_pieces, 'piece')} of output` : '';
  return {
    kind: 'call', label: call.name, from, to, open: pause.open && ended === null, classes: 'call', number: null,
    text: `call ${call.id} of ${call.name}: ${words(call.status)}${pieces}`,
  };
}

function toRepairStripe(repair) {
  const to = instant(repair.at) ?? NaN;
  const from = instant(repair.started_at) ?? to - 1000 * repair.seconds;
  const kind = `${repair.truncated ? ' cut' : ''}${repair.promoted > 0 ? ' promoting' : ''}`;
  return {
    kind: 'repair', label: `${repair.number} ${words(repair.trigger)}`, from, to, open: false, classes: `repair${kind}`, number: repair.number,
    text: `repair ${repair.number} on ${words(repair.trigger)}: ${plural(repair.promoted, 'token')} brought back in ${seconds(repair.seconds)}${repair.truncated ? ', cut short' : ''}`,
  };
}

/** @param {{lane: LaneView, chosen: number | null}} props */
export function Lane({ lane, chosen }) {
  const frame = useRef(/** @type {HTMLElement | null} */ (null));
  const [width, setWidth] = useState(NARROWEST);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (frame.current);
    const observer = new ResizeObserver(() => setWidth(Math.max(NARROWEST, element.clientWidth - 2)));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const height = TOP + ROW * lane.stripes.length + 6;
  const x = (time) => LABELS + ((time - lane.from) / (lane.to - lane.from)) * (width - LABELS - 10);
  const shares = width < 640 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  const ticks = shares.map((share) => lane.from + share * (lane.to - lane.from));
  return html`<figure class="lane" ref=${frame}>
    <figcaption><strong>${lane.title}</strong> <span class="note">${lane.note}</span></figcaption>
    <div class="scroll" tabindex="0" role="region" aria-label=${`Timeline: ${lane.title}`}>
      <svg width=${width} height=${height} role="img" aria-label=${describe(lane)}>
        ${ticks.map((time, index) => html`<g key=${index}>
          <line class="axis" x1=${x(time)} x2=${x(time)} y1=${TOP - 4} y2=${height} />
          <text x=${x(time)} y="14" text-anchor=${index === ticks.length - 1 ? 'end' : 'start'}>${seconds((time - lane.from) / 1000)}</text>
        </g>`)}
        ${lane.stripes.map((stripe, row) => {
          const top = TOP + ROW * row;
          const known = Number.isFinite(stripe.from) && Number.isFinite(stripe.to);
          return html`<g key=${row}>
            <text x="8" y=${top + 16} font-weight=${stripe.number !== null && stripe.number === chosen ? 700 : 400}>${stripe.label.slice(0, 24)}</text>
            ${known && html`<rect class=${stripe.classes} x=${x(stripe.from)} y=${top + 4} rx="2"
              width=${Math.max(4, x(stripe.to) - x(stripe.from))} height=${ROW - 9}><title>${stripe.text}</title></rect>`}
          </g>`;
        })}
      </svg>
    </div>
    <details><summary class="note">As a list</summary>
      <ul>${lane.stripes.map((stripe, index) => html`<li key=${index}>${stripe.text}</li>`)}</ul>
    </details>
  </figure>`;
}

function describe(lane) {
  return `${lane.title}: ${lane.stripes.map(({ text }) => text).join('; ')}`;
}
