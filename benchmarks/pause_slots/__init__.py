"""Slots of paused sessions: whose is given away, simulated on recorded pauses."""
