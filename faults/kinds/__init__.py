"""Kinds of faults, their schedule, and their injection."""
