"""Time to first token, from a turn's seconds by phase."""

from collections.abc import Mapping

_PHASES_BEHIND = ("append", "decode", "evict", "flush")


def seconds_to_first_token(seconds: Mapping[str, float]) -> float:
    """Sum the phases from a turn's arrival to its first token, in seconds.

    For a turn that appends a recorded reply: up to the point at which generation could have begun.
    """
    return sum(value for phase, value in seconds.items() if phase not in _PHASES_BEHIND)
