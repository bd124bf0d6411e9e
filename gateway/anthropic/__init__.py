"""Anthropic's API over sessions: messages, their streams and threads, and counts of tokens."""
