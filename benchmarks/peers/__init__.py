"""Rows that other libraries keep on the same input: fixtures for comparison with our methods."""
