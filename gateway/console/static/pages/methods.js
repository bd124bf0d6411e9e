// @ts-check
/** Eviction methods and the repair, with their settings as their schemas say them. */
import { Loaded, PageHead, Table } from '../components/basics.js';
import { useResource } from '../core/resource.js';
import { html } from '../core/ui.js';

export function MethodsPage() {
  const methods = useResource('/v1/methods');
  return html`
    <${PageHead} title="Methods" />
    <p>A session chooses one when it is created. Repair works with all of them.</p>
    <${Loaded} resource=${methods}>${(data) => html`
      ${data.repair && html`<${Method} method=${data.repair} kind="repair_settings of a session" />`}
      ${data.prefill && html`<${Method} method=${data.prefill} kind="prefill of a session" />`}
      ${data.methods.map((method) => html`<${Method} key=${method.name} method=${method} kind="method_settings of a session" />`)}`}
    <//>`;
}

function Method({ method, kind }) {
  const rows = Object.entries(method.settings_schema.properties ?? {}).map(([name, schema]) => ({ name, ...schema }));
  const columns = [
    { name: 'Setting', value: (row) => html`<code>${row.name}</code>` },
    { name: 'Values', value: describeType },
    { name: 'Default', value: (row) => html`<code>${JSON.stringify(row.default)}</code>` },
    { name: 'Meaning', wide: true, value: (row) => row.description ?? row.title ?? '' },
  ];
  return html`<section class="panel" id=${method.name} aria-label=${method.name}>
    <h2>${method.name}</h2>
    <p>${method.summary}</p>
    ${rows.length > 0
      ? html`<${Table} caption=${`Settings of ${method.name}: ${kind}`} columns=${columns} rows=${rows} id=${(row) => row.name} />`
      : html`<p class="note">No settings.</p>`}
  </section>`;
}

/** A JSON schema's type and bounds in words. */
function describeType(schema) {
  const kinds = (schema.anyOf ?? [schema]).map((each) => {
    if (each.enum) return each.enum.join(', ');
    if (each.const !== undefined) return String(each.const);
    return each.type === 'null' ? 'null' : (each.type ?? 'any');
  });
  const bounds = (schema.anyOf ?? [schema]).flatMap((each) => [
    each.minimum !== undefined && `at least ${each.minimum}`,
    each.exclusiveMinimum !== undefined && `over ${each.exclusiveMinimum}`,
    each.maximum !== undefined && `at most ${each.maximum}`,
    each.exclusiveMaximum !== undefined && `under ${each.exclusiveMaximum}`,
  ]);
  return [kinds.join(' or '), ...bounds.filter(Boolean)].join(', ');
}
