"""Pending tool calls: reports on them, and their timeouts."""
