"""Speed and memory, measured side by side in one run; what was measured lies in `results/`."""
