// @ts-check
/** Settings of a method or of the repair, as a form out of their JSON schema. */
import { html } from '../core/ui.js';

/**
 * Fields of a schema's properties. Only what was changed is in `values`.
 * @param {{title: string, schema: any, values: Record<string, any>, onChange: (values: Record<string, any>) => void}} props
 */
export function SettingsForm({ title, schema, values, onChange }) {
  const properties = Object.entries(schema?.properties ?? {});
  if (!properties.length) return null;
  const set = (name, value) => {
    const changed = { ...values };
    if (value === undefined) delete changed[name];
    else changed[name] = value;
    onChange(changed);
  };
  return html`<details>
    <summary>${title}</summary>
    <div class="row">
      ${properties.map(([name, property]) => html`<${Field} key=${name} name=${name} property=${property} value=${values[name]} onChange=${(value) => set(name, value)} />`)}
    </div>
  </details>`;
}

function Field({ name, property, value, onChange }) {
  const kinds = property.anyOf ?? [property];
  const choices = kinds.flatMap((kind) => kind.enum ?? (kind.const === undefined ? [] : [kind.const]));
  const number = kinds.find((kind) => kind.type === 'number' || kind.type === 'integer');
  const standard = JSON.stringify(property.default);
  const title = property.description ?? '';
  if (property.type === 'boolean') {
    return html`<label class="field" title=${title}>${name}
      <select value=${value === undefined ? '' : String(value)} onChange=${(event) => onChange(event.target.value === '' ? undefined : event.target.value === 'true')}>
        <option value="">default: ${standard}</option><option value="true">true</option><option value="false">false</option>
      </select></label>`;
  }
  if (choices.length && !number) {
    return html`<label class="field" title=${title}>${name}
      <select value=${value ?? ''} onChange=${(event) => onChange(event.target.value || undefined)}>
        <option value="">default: ${standard}</option>${choices.map((choice) => html`<option key=${choice} value=${choice}>${choice}</option>`)}
      </select></label>`;
  }
  if (number) {
    return html`<label class="field" title=${title}>${name}
      <input type="number" step=${number.type === 'integer' ? 1 : 'any'} min=${number.minimum} max=${number.maximum} placeholder=${standard} value=${value ?? ''}
        onInput=${(event) => onChange(event.target.value === '' ? undefined : Number(event.target.value))} /></label>`;
  }
  return html`<label class="field" title=${title}>${name} (JSON)
    <input placeholder=${standard} onChange=${(event) => onChange(readJson(event.target))} /></label>`;
}

/** The value of a field with JSON; the browser says what is wrong with it. */
function readJson(/** @type {HTMLInputElement} */ input) {
  input.setCustomValidity('');
  if (input.value.trim() === '') return undefined;
  try {
    return JSON.parse(input.value);
  } catch {
    input.setCustomValidity('This is not JSON.');
    input.reportValidity();
    return undefined;
  }
}
