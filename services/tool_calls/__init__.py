"""Pending tool calls: reports on them, their timeouts, and the output that they have so far."""
