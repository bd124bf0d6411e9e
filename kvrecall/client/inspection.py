"""Models of what sessions hold, for those who look into them: log, memory map, family, pauses, activity."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from kvrecall.client.models import (
    Message,
    Repair,
    Reselections,
    TurnEpisode,
    TurnMemory,
    TurnPrefill,
    TurnRetrieval,
)


@dataclass(frozen=True)
class TurnSpan:
    """Consecutive tokens of one side, from `start` to `stop` - 1; results of tools are the user's."""

    side: str
    start: int
    stop: int


@dataclass(frozen=True)
class LoggedTurn:
    """Committed turn of the log: its input `messages`, what was generated as `answer`, its tokens."""

    turn: int
    start: int
    stop: int
    messages: tuple[Message, ...]
    answer: Message | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    prefilled_tokens: int
    spans: tuple[TurnSpan, ...]
    seconds: Mapping[str, float]
    started_at: datetime
    committed_at: datetime
    worker: str | None
    retries: int
    episode: TurnEpisode | None
    durable: bool
    memory: TurnMemory
    reselections: Reselections | None = None
    prefill: TurnPrefill | None = None
    retrieval: TurnRetrieval | None = None
    settled_tokens: int = 0


@dataclass(frozen=True)
class TurnLog:
    """Turns of a session, oldest first; `next_after` is None where no more follow."""

    session: str
    turns_total: int
    length: int
    turns: tuple[LoggedTurn, ...]
    next_after: int | None


@dataclass(frozen=True)
class LayerCells:
    """Cells of a layer in base64, a byte for each column; see `MemoryMap`."""

    active: str
    promoted: str

    def get_shares(self) -> tuple[float, ...]:
        """Return the share of active rows of each column: 0.0 none, 1.0 all."""
        return tuple(value / 255 for value in base64.b64decode(self.active))

    def get_promoted_shares(self) -> tuple[float, ...]:
        """Return the share of rows that a repair promoted since the last turn, of each column."""
        return tuple(value / 255 for value in base64.b64decode(self.promoted))


@dataclass(frozen=True)
class MemoryMap:
    """Map of the tokens from `start` to `stop` - 1, in `columns` equal parts, layer by layer."""

    session: str
    length: int
    start: int
    stop: int
    columns: int
    head: int | None
    kv_heads: int
    layers: tuple[LayerCells, ...]
    sinks: int
    recent_start: int
    turn_start: int | None
    episode: str
    turns: int
    repairs: int


@dataclass(frozen=True)
class MemoryToken:
    """Token, the rows that hold it, and the `reason`, with a sentence as `detail`.

    `held` and `promoted` have a mask of KV heads in hexadecimal for each layer.
    """

    position: int
    id: int
    text: str
    turn: int
    side: str
    held: tuple[str, ...]
    promoted: tuple[str, ...]
    rows: int
    rows_total: int
    reason: str
    detail: str
    repair: int | None
    repairs: tuple[int, ...]
    score: float | None

    def get_heads(self, layer: int) -> tuple[int, ...]:
        """Return the KV heads of a layer that hold the token."""
        mask = int(self.held[layer], 16)
        return tuple(head for head in range(mask.bit_length()) if mask >> head & 1)


@dataclass(frozen=True)
class MemoryTokens:
    """Tokens from `start` to `stop` - 1; of `log_length` tokens of the log `length` are computed."""

    session: str
    length: int
    log_length: int
    start: int
    stop: int
    layers: int
    kv_heads: int
    tokens: tuple[MemoryToken, ...]


@dataclass(frozen=True)
class SharedTokens:
    """Leading tokens whose stored rows are those of another session."""

    session: str
    tokens: int


@dataclass(frozen=True)
class FamilyMember:
    """Session of a family, forked from `parent` at the end of `turn`; a deleted one has its id alone."""

    id: str
    parent: str | None
    turn: int | None
    exists: bool
    turns: int | None
    length: int | None
    state: str | None
    created_at: datetime | None
    shared: tuple[SharedTokens, ...]


@dataclass(frozen=True)
class Family:
    """Family of a session, `root` first; `complete`: all sessions of the tenant were looked at."""

    session: str
    root: str
    members: tuple[FamilyMember, ...]
    scanned: int
    complete: bool


@dataclass(frozen=True)
class PauseCall:
    """Tool call of a pause with its times; None is one that was not stored or has not come."""

    id: str
    name: str
    status: str
    started: bool
    called_at: datetime
    started_at: datetime | None
    last_event_at: datetime | None
    ended_at: datetime | None
    output_pieces: int
    output_bytes: int
    result_bytes: int | None


@dataclass(frozen=True)
class PauseRepair(Repair):
    """Repair of a pause; `started_at` and `call_id` are None where they are not known."""

    number: int
    turn: int
    at: datetime
    started_at: datetime | None
    call_id: str | None
    signal: str


@dataclass(frozen=True)
class Pause:
    """Pause after a turn: its tool calls, and the repairs that are retained, oldest first."""

    turn: int
    began_at: datetime
    ended_at: datetime | None
    open: bool
    calls: tuple[PauseCall, ...]
    repairs: tuple[PauseRepair, ...]


@dataclass(frozen=True)
class Activity:
    """What was counted. Times to the first token are upper bounds, None without any."""

    turns: int
    failed_turns: int
    failed_creations: int
    retried_turns: int
    prompt_tokens: int
    output_tokens: int
    not_durable_turns: int
    repairs: int
    failed_repairs: int
    promoted: int
    in_pause_repairs: int
    timeouts: int
    rebuilt_pages: int
    moves: int
    first_tokens: int
    first_token_seconds_p50: float | None
    first_token_seconds_p95: float | None


@dataclass(frozen=True)
class ActivityStep(Activity):
    """What was counted from `at` on, for the `step_seconds` of the overview."""

    at: datetime


@dataclass(frozen=True)
class Overview:
    """What a gateway did in the last 15 minutes, or `since` it was started."""

    window_seconds: int
    step_seconds: int
    since: datetime
    sessions: int
    active: Mapping[str, int]
    totals: Activity
    steps: tuple[ActivityStep, ...]


@dataclass(frozen=True)
class Version:
    """Version of the service, the revision of its source if that is known, and its model."""

    version: str
    revision: str
    protocol: int
    model: str
    fingerprint: str
