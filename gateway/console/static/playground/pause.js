// @ts-check
/** The pause between a tool call and its result: its events by hand, its clock, its repairs. */
import { Lane, toLanes } from '../components/lane.js';
import { sessionPath } from '../core/api.js';
import { instant, words } from '../core/format.js';
import { useResource } from '../core/resource.js';
import { html, useEffect, useMemo, useState } from '../core/ui.js';
import { exampleResult } from './tools.js';

/**
 * @param {{session: any, version: number, busy: boolean, report: (event: any) => Promise<any>, onTurn: (wait: boolean) => void}} props
 */
export function Pause({ session, version, busy, report, onTurn }) {
  const pauses = useResource(sessionPath(session.id, '/pauses?limit=1'), { version, every: 5000 });
  const pause = pauses.data?.pauses[0];
  const lanes = useMemo(() => (pause ? toLanes([pause], pause.repairs) : []), [pause]);
  const open = session.pending_calls.filter(({ status }) => status === 'pending');
  return html`<section class="panel pause" aria-label="Pause">
    <div class="row middle"><h2>Pause: the model waits for a tool</h2><${Clock} since=${instant(pause?.began_at)} /></div>
    ${session.pending_calls.map((call) => html`<${Call} key=${call.id} call=${call} busy=${busy} report=${report} />`)}
    ${lanes.map((lane) => html`<${Lane} key=${lane.title} lane=${lane} chosen=${null} />`)}
    <div class="row">
      <button type="button" disabled=${busy || open.length > 0} onClick=${() => onTurn(false)}>Next turn now</button>
      <button type="button" class="primary" disabled=${busy || open.length > 0} onClick=${() => onTurn(true)}>Wait for repairs, then the next turn</button>
    </div>
    <p class="note">${open.length > 0 ? 'The next turn needs a result, or a failure, of every call.' : '“Now” stops a repair that is still running and uses what it has found.'}</p>
  </section>`;
}

function Call({ call, busy, report }) {
  const [result, setResult] = useState(exampleResult(call.name));
  const [piece, setPiece] = useState('');
  const ended = call.status !== 'pending';
  const send = (type, members = {}) => report({ type: `tool_call.${type}`, call_id: call.id, ...members });
  const sendPiece = async () => {
    if (await send('delta', { delta: piece })) setPiece('');
  };
  return html`<fieldset disabled=${ended || busy}>
    <legend><code>${call.name}</code> ${words(call.status)}</legend>
    <p class="call mono">${call.name}(${call.arguments})</p>
    <div class="row">
      <button type="button" onClick=${() => send('started')}>Started</button>
      <label class="field">Piece of output<input value=${piece} onInput=${(event) => setPiece(event.target.value)} /></label>
      <button type="button" disabled=${!piece || ended || busy} onClick=${sendPiece}>Send the piece</button>
    </div>
    <p><label class="field">Result<textarea rows="2" value=${result} onInput=${(event) => setResult(event.target.value)}></textarea></label></p>
    <div class="row">
      <button type="button" class="primary" onClick=${() => send('completed', { result })}>Send the result</button>
      <button type="button" class="danger" onClick=${() => send('failed', { result })}>Fail with it</button>
    </div>
  </fieldset>`;
}

/** Seconds since the pause began, every second. */
function Clock({ since }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  if (since === null) return null;
  return html`<span class="note" role="timer">for ${Math.max(0, Math.round((now - since) / 1000))} s</span>`;
}
