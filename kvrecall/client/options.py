"""Keyword arguments of turns, as typed dictionaries. All are optional."""

from collections.abc import Sequence
from typing import TypedDict


class Logprobs(TypedDict, total=False):
    """Next-token distributions: save this turn's, or compare with those of another session."""

    save: bool
    compare_with: str | None


class TurnOptions(TypedDict, total=False):
    """Sampling parameters and options of a turn."""

    # False: append the messages without generating a reply.
    generate: bool
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: Sequence[str]
    # Wait (for a bounded time) while another turn of the session runs.
    queue: bool
    # Repair on these messages before they are prefilled; None: if `repair_on` has turn
    # and something is predicted.
    repair: bool | None
    wait_for_repairs: bool
    logprobs: Logprobs
