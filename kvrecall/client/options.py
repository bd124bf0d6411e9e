"""Keyword arguments of turns, as typed dictionaries. All are optional."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class Logprobs(TypedDict, total=False):
    """Next-token distributions: save this turn's, or compare with those of another session.

    `top`: report the log-probability of each token, and of so many of the likeliest in its place.
    """

    save: bool
    compare_with: str | None
    top: int | None


class TurnOptions(TypedDict, total=False):
    """Sampling parameters and options of a turn."""

    # False: append the messages without generating a reply.
    generate: bool
    max_tokens: int | None
    # Of these and of those below without a value: the model's default.
    temperature: float | None
    top_p: float | None
    top_k: int | None
    seed: int | None
    stop: Sequence[str]
    # Wait (for a bounded time) while another turn of the session runs.
    queue: bool
    # Repair on these messages before they are prefilled; None: if `repair_on` has turn
    # and something is predicted.
    repair: bool | None
    wait_for_repairs: bool
    logprobs: Logprobs
    # Penalties count the tokens of this answer alone.
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    min_p: float | None
    # By token id, as text.
    logit_bias: Mapping[str, float] | None
    # As in the OpenAI API.
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Mapping[str, Any] | None
