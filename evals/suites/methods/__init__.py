"""Suite methods: every method at every budget, recall of planted facts and fidelity together."""
