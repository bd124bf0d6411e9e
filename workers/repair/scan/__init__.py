"""Scans of all stored rows against a signal: exact, bounded, by summary."""
