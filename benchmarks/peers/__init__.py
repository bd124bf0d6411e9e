"""Peers: the same session in other libraries, and the rows that they keep on the same input."""
