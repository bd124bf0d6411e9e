"""Turns, from exclusive access to the session to the commit."""
