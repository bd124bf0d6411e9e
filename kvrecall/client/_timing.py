"""What the service says of a turn, in one number."""

from collections.abc import Mapping

_BEFORE_A_TOKEN = ("waiting", "queued", "repair", "prefill", "first_token")


def seconds_to_first_token(seconds: Mapping[str, float]) -> float:
    """From a turn's arrival to its first token, given its seconds by phase.

    Of a turn that only remembers a recorded reply: to the moment at which the model could have begun to answer.
    """
    return sum(seconds.get(phase, 0.0) for phase in _BEFORE_A_TOKEN)
