"""Pending tool calls: their timeouts, and the output that they have reported so far."""
