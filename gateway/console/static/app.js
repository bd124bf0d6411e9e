// @ts-check
/** The console: its frame, and the page of each address. */
import { Dialog, Empty, Failure, PageHead } from './components/basics.js';
import { getKey, onAccess, setKey } from './core/access.js';
import { get } from './core/api.js';
import { BASE, followLinks, useAddress } from './core/router.js';
import { applyTheme, getTheme, setTheme } from './core/theme.js';
import { html, render, useEffect, useState } from './core/ui.js';
import { MethodsPage } from './pages/methods.js';
import { OverviewPage } from './pages/overview.js';
import { SessionFrame, isSessionPage } from './pages/session.js';
import { SessionsPage } from './pages/sessions.js';
import { WorkersPage } from './pages/workers.js';
import { PlaygroundPage } from './playground/page.js';

const NAVIGATION = [
  ['', 'Overview'],
  ['sessions', 'Sessions'],
  ['playground', 'Playground'],
  ['workers', 'Workers'],
  ['methods', 'Methods'],
];

/** @typedef {{read_only: boolean, version: string}} ConsoleSettings */

function App() {
  const { parts } = useAddress();
  const [settings, setSettings] = useState(/** @type {ConsoleSettings | null} */ (null));
  const [error, setError] = useState(/** @type {unknown} */ (null));
  useEffect(() => {
    get(`${BASE}/settings.json`).then(setSettings, setError);
  }, []);
  const here = parts[0] ?? '';
  const links = NAVIGATION.filter(([name]) => name !== 'playground' || !settings?.read_only);
  return html`
    <a class="skip" href="#main">To the content</a>
    <header class="top">
      <a class="brand" href=${BASE}><img src=${`${BASE}/assets/icon.svg`} alt="" />kvrecall</a>
      <nav aria-label="Console"><ul>
        ${links.map(([name, title]) => html`<li key=${name}>
          <a href=${name ? `${BASE}/${name}` : `${BASE}/`} aria-current=${here === name ? 'page' : null}>${title}</a></li>`)}
      </ul></nav>
      <${Access} />
    </header>
    <main id="main">
      <${Failure} error=${error} />
      ${settings && html`<${Page} parts=${parts} readOnly=${settings.read_only} />`}
    </main>`;
}

function Page({ parts, readOnly }) {
  const [first, id, page = ''] = parts;
  if (parts.length === 0) return html`<${OverviewPage} />`;
  if (first === 'sessions' && parts.length === 1) return html`<${SessionsPage} readOnly=${readOnly} />`;
  if (first === 'sessions' && parts.length <= 3 && isSessionPage(page)) {
    return html`<${SessionFrame} key=${id} id=${id} page=${page} readOnly=${readOnly} />`;
  }
  if (parts.length === 1 && first === 'workers') return html`<${WorkersPage} readOnly=${readOnly} />`;
  if (parts.length === 1 && first === 'methods') return html`<${MethodsPage} />`;
  if (parts.length === 1 && first === 'playground' && !readOnly) return html`<${PlaygroundPage} />`;
  return html`<${PageHead} title="No such page" /><${Empty}>There is nothing at this address. <a href=${`${BASE}/`}>To the overview</a><//>`;
}

/** Theme and key; the key's form opens by itself when the service asks for one. */
function Access() {
  const [open, setOpen] = useState(false);
  const [draft, setDraft] = useState('');
  const [theme, choose] = useState(getTheme());
  const [hasKey, setHasKey] = useState(getKey() !== '');
  useEffect(() => {
    const forgetRefused = onAccess('refused', () => setOpen(true));
    const forgetChange = onAccess('change', () => setHasKey(getKey() !== ''));
    return () => (forgetRefused(), forgetChange());
  }, []);
  const close = () => (setDraft(''), setOpen(false));
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    setKey(draft.trim());
    close();
  };
  return html`<div class="access">
    <label class="row middle"><span class="hidden">Theme</span>
      <select value=${theme} onChange=${(event) => (choose(event.target.value), setTheme(event.target.value))}>
        <option value="system">System theme</option><option value="light">Light</option><option value="dark">Dark</option>
      </select></label>
    <button type="button" onClick=${() => setOpen(true)}>${hasKey ? 'Key: set' : 'Key: none'}</button>
    <${Dialog} open=${open} title="API key" onClose=${close}>
      <form onSubmit=${save}>
        <p>A key of <code>kvrecall keys create</code>. It is kept in this tab only, and is gone with it.</p>
        <p><label class="field">Key<input type="password" autocomplete="off" spellcheck="false" value=${draft} onInput=${(event) => setDraft(event.target.value)} /></label></p>
        <div class="row">
          <button type="submit" class="primary" disabled=${!draft.trim()}>Use it</button>
          ${hasKey && html`<button type="button" onClick=${() => (setKey(''), close())}>Forget it</button>`}
          <button type="button" onClick=${close}>Cancel</button>
        </div>
      </form>
    <//>
  </div>`;
}

applyTheme();
followLinks();
render(html`<${App} />`, document.getElementById('app'));
