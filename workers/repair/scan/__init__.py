"""Scans of all stored rows against a signal: exact, bounded, or by page summaries."""
