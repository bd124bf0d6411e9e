// @ts-check
/** The form of a new session: presets, method, budget, repair, and the full cache beside it. */
import { Failure } from '../components/basics.js';
import { html, useState } from '../core/ui.js';
import { createSession } from './calls.js';
import { SettingsForm } from './settings-form.js';
import { TOOLS, toSchema } from './tools.js';

/** @typedef {{budget: number, repair_rows: number, method: string, compare: boolean}} Preset */

// A session that says nothing of its method: every token stays reachable.
const RECALL = '';
/** @type {Record<string, Preset>} */
const PRESETS = {
  'Recall': { budget: 128, repair_rows: 0, method: RECALL, compare: false },
  'Small budget': { budget: 128, repair_rows: 32, method: 'snapkv', compare: false },
  'Full beside it': { budget: 256, repair_rows: 64, method: 'snapkv', compare: true },
  'Budget alone': { budget: 256, repair_rows: 0, method: 'snapkv', compare: false },
};
const TRIGGERS = ['tool_call', 'tool_delta', 'tool_result', 'last_output', 'turn'];
const METADATA = { made_by: 'console playground' };

/**
 * Create the session with the full cache that another one is compared with.
 * @param {object} settings
 * @param {number} budget
 */
export function createFull(settings, budget) {
  return createSession({ ...settings, recall: false, budget, metadata: { ...METADATA, compared: 'full cache' } });
}

/** Settings that all sessions of the playground have. */
export function commonSettings(tools = TOOLS) {
  return { tools: tools.map(toSchema), metadata: METADATA };
}

/**
 * @param {{methods: any, worker: any, onCreated: (session: string, full: string | null) => void}} props
 */
export function Setup({ methods, worker, onCreated }) {
  const [values, setValues] = useState({ ...PRESETS.Recall, repair_on: TRIGGERS.slice(0, 3) });
  const [methodSettings, setMethodSettings] = useState({});
  const [repairSettings, setRepairSettings] = useState({});
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const [busy, setBusy] = useState(false);
  const set = (changed) => setValues((before) => ({ ...before, ...changed }));
  const method = methods.methods.find(({ name }) => name === values.method);
  const create = async (/** @type {Event} */ event) => {
    event.preventDefault();
    setBusy(true);
    setError(null);
    const { budget, repair_rows, repair_on } = values;
    try {
      const common = commonSettings();
      const full = values.compare ? await createFull(common, worker.max_budget) : null;
      const made = await createSession({
        ...common, budget, ...(values.method === RECALL ? {} : { research: { repair_rows, repair_on, method: values.method, method_settings: methodSettings, repair_settings: repairSettings } }),
      });
      onCreated(made.id, full?.id ?? null);
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  const trigger = (name, on) => set({ repair_on: TRIGGERS.filter((each) => (each === name ? on : values.repair_on.includes(each))) });
  return html`<form class="panel stack" onSubmit=${create}>
    <h2>A new session</h2>
    <div class="row" role="group" aria-label="Presets">
      ${Object.entries(PRESETS).map(([name, preset]) => html`<button type="button" key=${name} onClick=${() => set(preset)}
        aria-pressed=${Object.entries(preset).every(([key, value]) => values[key] === value)}>${name}</button>`)}
    </div>
    <div class="row">
      <label class="field">Method<select value=${values.method} onChange=${(event) => (set({ method: event.target.value }), setMethodSettings({}))}>
        <option value=${RECALL}>recall: every token stays reachable</option>
        <optgroup label="For research">${methods.methods.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}</optgroup></select></label>
      <label class="field">Budget, rows<input type="number" required min=${worker.min_budget} max=${worker.max_budget} value=${values.budget} onInput=${(event) => set({ budget: Number(event.target.value) })} /></label>
      ${method && html`<label class="field">Of these for repair<input type="number" required min="0" max=${worker.max_budget} value=${values.repair_rows} onInput=${(event) => set({ repair_rows: Number(event.target.value) })} /></label>`}
    </div>
    ${method && html`<p class="note">${method.summary}</p>
    <fieldset><legend>Repair on</legend>
      <div class="row">${TRIGGERS.map((name) => html`<label class="check" key=${name}>
        <input type="checkbox" checked=${values.repair_on.includes(name)} onChange=${(event) => trigger(name, event.target.checked)} />${name.replace('_', ' ')}</label>`)}</div>
    </fieldset>
    <${SettingsForm} title=${`Settings of ${values.method}`} schema=${method.settings_schema} values=${methodSettings} onChange=${setMethodSettings} />
    <${SettingsForm} title="Settings of the repair" schema=${methods.repair?.settings_schema} values=${repairSettings} onChange=${setRepairSettings} />`}
    <${Failure} error=${error} />
    <div class="row middle">
      <button type="submit" class="primary" disabled=${busy}>Create the session</button>
      <label class="check"><input type="checkbox" checked=${values.compare} onChange=${(event) => set({ compare: event.target.checked })} />Compare with the full cache</label>
    </div>
  </form>`;
}
