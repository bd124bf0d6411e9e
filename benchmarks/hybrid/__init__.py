"""Turns of a model with recurrent states beside those of a dense model of the same size."""
