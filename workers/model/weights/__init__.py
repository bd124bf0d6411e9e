"""Weights of a model: the formats of their files, and how linear layers hold them."""
