"""Keyword arguments of sessions and turns, as typed dictionaries. All are optional."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class EpisodeOptions(TypedDict, total=False):
    """Episode settings of a new session."""

    count: int | Literal["auto"]
    segment_utterances: int
    medoid_utterances: int
    build: Literal["one_pass", "per_episode"]
    rebuild_growth: float


class SessionOptions(TypedDict, total=False):
    """Settings of a new session, fixed for its lifetime. Omitted ones get the service's default."""

    # Expected model; rejected unless the service serves it.
    model: str | None
    # Active rows per KV head, mean over layers, and the rows of it reserved for repair.
    budget: int | None
    repair_rows: int | None
    # Signals that trigger a repair: tool_call, tool_delta, tool_result, last_output, turn.
    repair_on: Sequence[str]
    repair_scan: Literal["exact", "bounded", "summary"] | None
    repair_settings: Mapping[str, Any]
    repair_seconds: float | None
    # Eviction method and its settings; see `KvrecallClient.methods`.
    method: str | None
    method_settings: Mapping[str, Any]
    layer_budgets: Literal["uniform", "pyramid", "sensitivity"] | None
    episodes: EpisodeOptions | None
    seed: int | None
    # Tools that the model may call, in the format of the OpenAI API.
    tools: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, str]


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
    # Repair on these messages before they are prefilled; None: if `repair_on` has turn.
    repair: bool | None
    wait_for_repairs: bool
    logprobs: Logprobs
