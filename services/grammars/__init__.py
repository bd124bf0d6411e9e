"""Grammars of requests: whether a worker can hold an answer to them."""
