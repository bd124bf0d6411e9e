"""Placement of sessions on workers, simulated on a recorded trace."""
