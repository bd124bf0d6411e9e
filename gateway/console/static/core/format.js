// @ts-check
/** Numbers, sizes and times as text. */

const INTEGER = new Intl.NumberFormat('en-GB');

export function count(/** @type {number | null | undefined} */ value) {
  return value === null || value === undefined ? '–' : INTEGER.format(value);
}

export function bytes(/** @type {number | null | undefined} */ value) {
  if (value === null || value === undefined) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? rest : rest.toFixed(rest < 10 ? 2 : 1)} ${units[unit]}`;
}

export function seconds(/** @type {number | null | undefined} */ value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0 s';
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function percent(/** @type {number | null | undefined} */ share) {
  return share === null || share === undefined ? '–' : `${Math.round(100 * share)}%`;
}

/** A time of the API in the browser's own zone. */
export function moment(/** @type {string | null | undefined} */ text) {
  if (!text) return '–';
  return new Date(text).toLocaleString('en-GB', {
    day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit',
  });
}

/** A time of day in the browser's own zone. */
export function clock(/** @type {Date} */ time) {
  return time.toLocaleTimeString('en-GB');
}

/** Milliseconds since the epoch; null where there is no time. */
export function instant(/** @type {string | null | undefined} */ text) {
  return text ? Date.parse(text) : null;
}

export function plural(/** @type {number} */ number, /** @type {string} */ noun) {
  return `${count(number)} ${noun}${number === 1 ? '' : 's'}`;
}

/** The beginning of a text. */
export function shorten(/** @type {string} */ text, length = 120) {
  const points = [...text.slice(0, 2 * length)];
  return points.length <= length && text.length <= 2 * length ? text : `${points.slice(0, length).join('')}…`;
}

/** A trigger or a reason of the API as words. */
export function words(/** @type {string} */ name) {
  return name.replaceAll('_', ' ');
}
