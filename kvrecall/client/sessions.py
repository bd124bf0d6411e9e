"""Sessions: their options at creation, and their models in responses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypedDict

from kvrecall.client.models import EpisodeSettings, JsonObject


class EpisodeOptions(TypedDict, total=False):
    """Episode settings of a new session."""

    count: int | Literal["auto"]
    build: Literal["one_pass", "per_episode"]


class ReselectionOptions(TypedDict, total=False):
    """When an answer selects the active rows anew, in tokens of the answer."""

    every: int


class ResearchOptions(TypedDict, total=False):
    """How a new session's active rows are chosen, for evaluations and papers. It may change in any release."""

    # Eviction method and its settings; see `KvrecallClient.methods`.
    method: str | None
    method_settings: Mapping[str, Any]
    layer_budgets: Literal["uniform", "pyramid", "sensitivity"] | None
    # Rows of the budget reserved for repair.
    repair_rows: int | None
    # Signals that trigger a repair: tool_call, tool_delta, tool_result, last_output, turn.
    repair_on: Sequence[str]
    repair_settings: Mapping[str, Any] | None
    repair_seconds: float | None
    # {"attend": "active" | "stored", "sparse": "off" | "auto" | "on", "alpha": 0.99}
    prefill: Mapping[str, Any] | None
    # Retrieval while answers are generated: {"share": 0.5, ...}.
    retrieve: Mapping[str, Any] | None
    reselect: ReselectionOptions | None
    episodes: EpisodeOptions | None


class SessionOptions(TypedDict, total=False):
    """Settings of a new session, fixed for its lifetime. Omitted ones get the service's default."""

    # Expected model; rejected unless the service serves it.
    model: str | None
    # True, the default: every token stays reachable within the budget. False: the full cache.
    recall: bool | None
    # Active rows per KV head, mean over layers, or "auto".
    budget: int | Literal["auto"] | None
    # Earlier answers keep their reasoning, whatever the model's chat template does with it.
    keep_reasoning: bool
    # Further arguments of the model's chat template, such as {"enable_thinking": False}.
    chat_template_kwargs: Mapping[str, Any] | None
    seed: int | None
    expires_after_seconds: float | None
    # Tools that the model may call, in the format of the OpenAI API.
    tools: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, str]
    # Rows are shared only with sessions of the same salt, say a random string for each end user.
    cache_salt: str | None
    # Name of a memory: turns see the nearest of what sessions with this name have said.
    remember: str | None
    research: ResearchOptions | None


@dataclass(frozen=True)
class PendingCall:
    """Tool call whose result has not been appended to the conversation yet.

    `status` is pending, completed, failed or timed_out.
    """

    id: str
    name: str
    arguments: str
    status: str


@dataclass(frozen=True)
class ForkOrigin:
    """Fork point: the parent session, and the turn at whose end the fork begins."""

    session: str
    turn: int


@dataclass(frozen=True)
class Reselection:
    """When an answer selects the active rows anew, in tokens of it."""

    every: int


@dataclass(frozen=True)
class Research:
    """How a session's active rows are chosen. What is here may change in any release."""

    method: str
    method_settings: JsonObject
    layer_budgets: str | None
    repair_rows: int
    repair_on: tuple[str, ...]
    repair_settings: JsonObject
    repair_seconds: float | None
    prefill: JsonObject
    retrieve: JsonObject
    reselect: Reselection | None
    episodes: EpisodeSettings | None


@dataclass(frozen=True)
class SessionMemory:
    """Memory of a session as committed. Active, peak and bound rows are the largest layer's."""

    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int


@dataclass(frozen=True)
class Session:
    """Session: its settings, its state, the number of turns and tokens.

    `durable`: as of the last turn, its rows survive the loss of their worker; null where that is not
    known, as before the first turn.
    """

    id: str
    state: str
    model: str
    worker: str
    recall: bool
    budget: int | Literal["auto"]
    keep_reasoning: bool
    chat_template_kwargs: JsonObject
    seed: int
    expires_after_seconds: float | None
    tools: tuple[JsonObject, ...]
    metadata: Mapping[str, str]
    forked_from: ForkOrigin | None
    turns: int
    length: int
    pending_calls: tuple[PendingCall, ...]
    created_at: datetime
    updated_at: datetime
    memory: SessionMemory
    durable: bool | None
    research: Research
    remember: str | None


@dataclass(frozen=True)
class SessionPage:
    """Page of sessions. Pass `next_cursor` as `cursor` to get the next page.

    `scanned` sessions were looked at for it: with a filter a page may have fewer than its limit, even
    none, and another may follow. `truncated`: there are more than those, which an order other than by
    creation leaves out.
    """

    sessions: tuple[Session, ...]
    next_cursor: str | None
    scanned: int
    truncated: bool


class SessionFilters(TypedDict, total=False):
    """Filters and order of a list of sessions. All are optional.

    - `state`: idle, paused, prefilling, decoding or repairing
    - `method`, `worker`: exact names
    - `q`: text in the id or in the metadata, in any case of letters
    - `order`: created (newest first), updated or length
    """

    state: str
    method: str
    worker: str
    q: str
    order: Literal["created", "updated", "length"]
