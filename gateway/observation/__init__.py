"""Logs and traces of requests, turns and the work between turns, for operators."""
