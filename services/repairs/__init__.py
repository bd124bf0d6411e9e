"""Repairs between turns, and the history of what they brought back."""
