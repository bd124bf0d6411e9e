"""Decode steps of dense models and hybrids in native code: what of a model it computes, and its test at load."""
