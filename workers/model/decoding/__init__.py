"""Decode steps of dense models in native code: what of a model it computes, and its test at load."""
