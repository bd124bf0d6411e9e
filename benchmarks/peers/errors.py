"""Errors of the run through peers."""


class PeerFailed(Exception):
    """A peer cannot run here, or ended; the message says why."""
