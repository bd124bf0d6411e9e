"""Scans of all of a session's stored keys against a signal, by token or by head."""
