"""Time to first token, from a turn's seconds by phase."""

from collections.abc import Mapping

_PHASES_BEFORE_FIRST_TOKEN = ("waiting", "queued", "repair", "prefill", "first_token")


def seconds_to_first_token(seconds: Mapping[str, float]) -> float:
    """Sum the phases from a turn's arrival to its first token, in seconds.

    For a turn that appends a recorded reply: up to the point at which generation could have begun.
    """
    return sum(seconds.get(phase, 0.0) for phase in _PHASES_BEFORE_FIRST_TOKEN)
