"""Correlation of log lines and traces over all processes: the current span, and its way over the wire."""
