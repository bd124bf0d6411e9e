// @ts-check
/** The theme: the system's unless another was chosen in this browser. */
import { useEffect, useState } from './ui.js';

const STORED = 'kvrecall.theme';
const changes = new EventTarget();

export function getTheme() {
  return localStorage.getItem(STORED) ?? 'system';
}

export function setTheme(/** @type {string} */ theme) {
  if (theme === 'system') localStorage.removeItem(STORED);
  else localStorage.setItem(STORED, theme);
  applyTheme();
}

export function applyTheme() {
  const theme = getTheme();
  if (theme === 'system') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  changes.dispatchEvent(new Event('change'));
}

/** A counter that changes with the theme: what is painted has to be painted again. */
export function useThemeVersion() {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const update = () => setVersion((count) => count + 1);
    const system = matchMedia('(prefers-color-scheme: dark)');
    changes.addEventListener('change', update);
    system.addEventListener('change', update);
    return () => {
      changes.removeEventListener('change', update);
      system.removeEventListener('change', update);
    };
  }, []);
  return version;
}

/**
 * The computed colour of a custom property, as the canvas takes it.
 * @param {string[]} names
 * @returns {string[]}
 */
export function resolveColors(names) {
  const probe = document.createElement('span');
  document.body.append(probe);
  const colors = names.map((name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return colors;
}
