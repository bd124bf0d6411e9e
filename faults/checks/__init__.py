"""Checks after and during faults."""
