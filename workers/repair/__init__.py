"""Repair: score evicted rows against a signal and promote the best."""
