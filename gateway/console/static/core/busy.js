// @ts-check
/** Work that a button begins. */
import { useState } from './ui.js';

/**
 * Whether work goes on, its last error, and a function that begins some.
 * @returns {[boolean, unknown, (work: () => Promise<void>) => Promise<void>]}
 */
export function useBusy() {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {unknown} */ (null));
  const run = async (/** @type {() => Promise<void>} */ work) => {
    setBusy(true);
    setError(null);
    try {
      await work();
    } catch (failure) {
      setError(failure);
    }
    setBusy(false);
  };
  return [busy, error, run];
}
