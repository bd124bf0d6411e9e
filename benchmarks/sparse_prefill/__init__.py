"""Sparse prefill beside dense attention, one block at a time."""
