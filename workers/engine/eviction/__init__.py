"""Eviction: which rows of a slot stay, and what they are ranked by."""
