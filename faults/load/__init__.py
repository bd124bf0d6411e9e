"""Clients under faults: scripted conversations, and contended sessions."""
