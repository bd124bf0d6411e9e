// @ts-check
/** Preact, its hooks and htm, by the names that modules of the console import. */
import htm from '../vendor/htm.module.js';
import { h } from '../vendor/preact.module.js';

export { render } from '../vendor/preact.module.js';
export {
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from '../vendor/hooks.module.js';

/** Templates as elements: values become text or attributes, and never markup. */
export const html = htm.bind(h);
