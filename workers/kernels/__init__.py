"""Kernels of a GPU for a decode step that retrieves: search, draw and attention, in Triton."""
