"""Models of what sessions hold, for those who look into them: log, memory map, family, pauses, activity."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from kvrecall.client.models import (
    Message,
    PauseRepair,
    Reselections,
    TurnEpisode,
    TurnMemory,
    TurnPrefill,
    TurnRemembered,
    TurnRetrieval,
)


@dataclass(frozen=True)
class TurnSpan:
    """Consecutive tokens of one side, from `start` to `stop` - 1; results of tools are the user's."""

    side: str
    start: int
    stop: int


@dataclass(frozen=True)
class TurnSender:
    """Who sent a turn: `api` is `rest`, `grpc`, `openai` or `anthropic`, `key` the id of an API key.

    `client` is the program, by the first words of its `User-Agent`. None where they are not known.
    """

    api: str
    key: str | None
    client: str | None


@dataclass(frozen=True)
class LoggedTurn:
    """Committed turn of the log: its input `messages`, what was generated as `answer`, its tokens.

    `seconds` are by phase, `phase_starts` those from `started_at` to each phase's first beginning.
    `request_id` and `trace_id` are of the request that ran it, None where there is none, `sender` is who
    sent that, None in older turns.
    """

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
    settled_tokens: int
    dropped_tokens: int
    spans: tuple[TurnSpan, ...]
    seconds: Mapping[str, float]
    started_at: datetime
    committed_at: datetime
    worker: str | None
    retries: int
    episode: TurnEpisode | None
    durable: bool
    memory: TurnMemory
    reselections: Reselections | None
    prefill: TurnPrefill | None
    retrieval: TurnRetrieval | None
    remembered: TurnRemembered | None
    request_id: str | None = None
    trace_id: str | None = None
    phase_starts: Mapping[str, float] = field(default_factory=dict)
    sender: TurnSender | None = None


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
    """Cells of a layer in base64, a byte for each column.

    A byte is 0 where no row of the column's tokens is active (or promoted by a repair since the last
    turn), 255 where all are, otherwise 1 to 254 in proportion.
    """

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
    """Map of the tokens from `start` to `stop` - 1 of a session as committed, in equal columns.

    Column c begins at token start + floor(c * n / columns) of n tokens. The first `sinks` tokens and
    those from `recent_start` on are never evicted. `turn_start` is the first token of the last turn,
    `episode` the active episode, empty without one. `turns`, and `repairs` since the last of them,
    were committed.
    """

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


Reason = Literal[
    "pending", "evicted", "sink", "recent", "promoted", "turn", "episode", "fits", "kept"
]


@dataclass(frozen=True)
class MemoryToken:
    """Token, the rows that hold it, and why.

    `held` and `promoted` have a mask of KV heads in hexadecimal for each layer: those where its row
    is active, and those where a repair brought it back since the last turn. `rows` of `rows_total`
    are active. `reason` is the first that applies: pending (sampled, not computed yet), evicted (in
    all layers), sink, recent, promoted, turn (of the last turn), episode (in the active one's
    selection), fits (nothing was evicted), kept (by the method). `repairs` are the numbers of the
    retained repairs that promoted it, `repair` is the last of them. `score`: with which it was last
    evicted, where that is among those that are kept.
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
    reason: Reason
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
    """Tokens from `start` to `stop` - 1 of a session as committed.

    Of `log_length` tokens of the log `length` are computed; the others are with the next turn.
    """

    session: str
    length: int
    log_length: int
    start: int
    stop: int
    layers: int
    kv_heads: int
    tokens: tuple[MemoryToken, ...]


@dataclass(frozen=True)
class FamilyMember:
    """Session of a family, forked from `parent` at the end of `turn`.

    One that does not exist any more has its id alone. `shared_tokens`: leading tokens whose stored
    rows it has in common with its parent.
    """

    id: str
    parent: str | None
    turn: int | None
    exists: bool
    turns: int | None
    length: int | None
    state: str | None
    created_at: datetime | None
    shared_tokens: int


@dataclass(frozen=True)
class Family:
    """Family of a session: `root` first, then by creation.

    `scanned` of the tenant's sessions were looked at, the newest; `complete`: these are all.
    """

    session: str
    root: str
    members: tuple[FamilyMember, ...]
    scanned: int
    complete: bool


@dataclass(frozen=True)
class PauseCall:
    """Tool call of a pause.

    `called_at` is the commit of the turn that made it, `started_at` the client's first event of it,
    `ended_at` its result or timeout; null where that was not stored or has not come. `status` is
    unknown where a later call of the session has the same id.
    """

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
class Pause:
    """Pause after a turn: its tool calls, and the retained repairs, oldest first.

    It began with the commit of `turn` and ended when the next one was asked for; null until
    then.
    """

    turn: int
    began_at: datetime
    ended_at: datetime | None
    open: bool
    calls: tuple[PauseCall, ...]
    repairs: tuple[PauseRepair, ...]


@dataclass(frozen=True)
class Pauses:
    """Last pauses of a session, newest first."""

    session: str
    pauses: tuple[Pause, ...]


@dataclass(frozen=True)
class Activity:
    """What was counted. Times to the first token are upper bounds of buckets, null without any."""

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
    """What was counted from `at` on, for `step_seconds` of the overview."""

    at: datetime


@dataclass(frozen=True)
class Overview:
    """What this gateway did for the tenant in the last 15 minutes, or `since` it was started.

    `sessions` is the number of the tenant's sessions; `active` counts those in which this gateway
    runs a turn or a repair, by state. `steps` are oldest first.
    """

    window_seconds: int
    step_seconds: int
    since: datetime
    sessions: int
    active: Mapping[str, int]
    totals: Activity
    steps: tuple[ActivityStep, ...]


@dataclass(frozen=True)
class Version:
    """Version of the service, the revision of its source where that is known, and its model.

    `protocol` is the version of the wire to workers. `model` and `fingerprint` are empty until a worker
    has joined.
    """

    version: str
    revision: str
    protocol: int
    model: str
    fingerprint: str
