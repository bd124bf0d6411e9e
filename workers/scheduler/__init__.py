"""Slots, and one decoding step for all sessions that decode."""
