"""Positions of sessions that are longer than the model's window: chunks, and rotations between them."""
