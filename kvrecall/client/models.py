"""Frozen models of the REST API's messages and responses, with the fields on the wire, in their order.

The service answers with these classes, and their docstrings are its API's descriptions: null is None.
Rows are counted per KV head; `_bytes` and `_seconds` fields have the unit of their name. Unknown
fields of a response are ignored, so that a client works with newer services.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from kvrecall.client._timing import seconds_to_first_token

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Function:
    """Function name and arguments of a tool call.

    `arguments`: JSON text of an object.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolCall:
    """Tool call, as in the OpenAI API."""

    id: str
    type: Literal["function"] = field(default="function", kw_only=True)
    function: Function

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name

    @property
    def arguments(self) -> JsonObject:
        """Arguments of the call, decoded. Raises ValueError when they are not JSON."""
        arguments: JsonObject = json.loads(self.function.arguments)
        return arguments

    def to_json(self) -> JsonObject:
        """Convert to the format of the API."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": function}


@dataclass(frozen=True)
class Message:
    """Message of a conversation, as in the OpenAI API.

    `reasoning` is what the model said before its reply.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None

    @classmethod
    def system(cls, content: str) -> "Message":
        """Build a system message."""
        return cls("system", content)

    @classmethod
    def user(cls, content: str) -> "Message":
        """Build a user message."""
        return cls("user", content)

    @classmethod
    def tool(cls, call_id: str, content: str) -> "Message":
        """Build the result of a tool call, to be sent with the next turn."""
        return cls("tool", content, tool_call_id=call_id)

    def to_json(self) -> JsonObject:
        """Convert to the format of the API; absent fields are left out."""
        message: JsonObject = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [call.to_json() for call in self.tool_calls]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class EpisodeSettings:
    """Episode settings of a session."""

    count: int | Literal["auto"]
    build: str


@dataclass(frozen=True)
class Repair:
    """Repair: its signal, the rows scored, promoted and demoted. Times in seconds, rows in tokens.

    `observed_tokens` of the signal's `signal_tokens` were observed: fewer beyond the worker's
    `signal_tokens` setting, or when the repair was `truncated`.
    `scored_rows` of `candidates` evicted tokens were scored, the fraction `share_scanned`: fewer
    when a deadline or a new turn `truncated` the repair.
    `demoted` rows left the active set in exchange. `in_pause`: it ended before the next turn.
    """

    trigger: str
    signal_tokens: int
    observed_tokens: int
    candidates: int
    scored_rows: int
    share_scanned: float
    promoted: int
    demoted: int
    seconds: float
    truncated: bool
    bytes_read: int
    in_pause: bool


@dataclass(frozen=True)
class RepairTotals:
    """Totals over the repairs since the previous turn, and their signals.

    `truncated` counts those stopped by a deadline or by the turn, `skipped` those that were pending
    and not started.
    """

    repairs: int
    signals: tuple[str, ...]
    scored_rows: int
    promoted: int
    demoted: int
    seconds: float
    truncated: int
    skipped: int


@dataclass(frozen=True)
class Passage:
    """Promoted tokens `start` to `stop` - 1 of the session, with the text around them."""

    start: int
    stop: int
    before: str
    promoted: str
    after: str


@dataclass(frozen=True)
class PauseRepair(Repair):
    """Repair of the history: the turn it was run for, its times, its signal.

    It was committed `at`, and `started_at` before. `call_id`: the tool call that it is conditioned
    on. Both are null where that is not known, `call_id` also for other signals.
    """

    number: int
    turn: int
    at: datetime
    started_at: datetime | None
    call_id: str | None
    signal: str


@dataclass(frozen=True)
class PastRepair(PauseRepair):
    """Repair of the history with the text that it promoted."""

    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Repairs:
    """Last repairs of a session, newest first."""

    session: str
    repairs: tuple[PastRepair, ...]


@dataclass(frozen=True)
class TurnMemory:
    """Memory of a session after a turn. Active, peak and bound rows are the largest layer's."""

    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: Mapping[str, int]
    repair: RepairTotals
    repairs: tuple[Repair, ...]


@dataclass(frozen=True)
class Memory:
    """Current memory of a session. Active, peak and bound rows are the largest layer's.

    `in_slot`: the active rows are resident in a slot of the worker. `retrieval_bytes`: of its host, of
    the rows that answers and repairs search, and their index.
    """

    session: str
    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int
    tier_bytes: Mapping[str, int]
    layer_active_rows: tuple[int, ...]
    layer_peak_rows: tuple[int, ...]
    layer_bound_rows: tuple[int, ...]
    in_slot: bool
    retrieval_bytes: int


@dataclass(frozen=True)
class Usage:
    """Token counts of a turn. `reasoning_tokens` are of the output.

    `dropped_tokens` of earlier turns are gone: reasoning that the model's chat template drops once a
    user's message follows.
    """

    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Alternative:
    """Token that could have been in a place, its UTF-8 bytes and its log-probability."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class TokenLogprob(Alternative):
    """Token of the text with the likeliest ones in its place."""

    top: tuple[Alternative, ...]


@dataclass(frozen=True)
class Fidelity:
    """Divergence from the compared session, over recorded assistant tokens.

    `kl_mean` is the mean KL divergence in nats, `top1_agreement` the share of tokens with the same
    most likely next token.
    """

    tokens: int
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class TurnEpisode:
    """Episode that a turn was routed to, and the rows moved to make it active.

    Rows are counted over all layers and KV heads; none move when the episode was active already.
    `similarity` is the cosine of the turn's text and the episode.
    """

    episode: str
    similarity: float
    switched: bool
    rows_moved: int
    rows_kept: int
    bytes_moved: int
    seconds: float


@dataclass(frozen=True)
class Reselections:
    """Selections that an answer made while it was generated, over all layers and KV heads.

    `seconds` include what other sessions generated meanwhile.
    """

    count: int
    rows_in: int
    rows_out: int
    seconds: float


@dataclass(frozen=True)
class TurnPrefill:
    """Blocks of a turn that were prefilled sparsely.

    `cover_min` and `cover_mean` are shares of attention weight that was computed, on the queries that
    checked it: the least of a layer and head, and the mean. `density` is the mean share of the rows
    that queries attended to.
    """

    blocks: int
    cover_min: float
    cover_mean: float
    density: float


@dataclass(frozen=True)
class TurnRetrieval:
    """What the steps of a turn retrieved from rows that were not active.

    `rows` are counted over all steps, layers and KV heads; `seconds` are of search and reading.
    `refused`: the worker had no memory to retrieve from, and the answer saw its active rows alone.
    """

    steps: int
    rows: int
    seconds: float
    refused: bool


@dataclass(frozen=True)
class TurnRemembered:
    """What a turn saw of its memory: of other sessions with its name, and of its own far exchanges.

    `passages` of these `sessions`, with so many `tokens`: of all but `prefilled_tokens` the rows that they
    had there.
    """

    passages: int
    tokens: int
    prefilled_tokens: int
    sessions: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """Committed turn: number `turn` of the session, the reply, usage, memory, seconds by phase."""

    session: str
    turn: int
    message: Message | None
    finish_reason: str
    usage: Usage
    memory: TurnMemory
    seconds: Mapping[str, float]
    fidelity: Fidelity | None = field(default=None, kw_only=True)
    episode: TurnEpisode | None = field(default=None, kw_only=True)
    durable: bool
    logprobs: tuple[TokenLogprob, ...] = ()
    reselections: Reselections | None = None
    prefill: TurnPrefill | None = None
    retrieval: TurnRetrieval | None = None
    remembered: TurnRemembered | None = None

    @property
    def text(self) -> str:
        """Text of the reply; empty when there is none."""
        return "" if self.message is None else self.message.content or ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls of the reply."""
        return () if self.message is None else self.message.tool_calls

    @property
    def seconds_to_first_token(self) -> float:
        """Seconds from the turn's arrival at the service to its first token."""
        return seconds_to_first_token(self.seconds)


@dataclass(frozen=True)
class EventReceipt:
    """Durable acknowledgement of an event; `outstanding` lists the calls without a result.

    `late`: the event had no effect because the call has its result already.
    """

    session: str
    call_id: str
    type: str
    status: str
    state: str
    outstanding: tuple[str, ...]
    late: bool


@dataclass(frozen=True)
class Episode:
    """Episode: its size, the text of its medoid segment, and the number of turns routed to it."""

    id: str
    active: bool
    segments: int
    tokens: int
    medoid: str
    matched: int


@dataclass(frozen=True)
class Episodes:
    """Episodes of a session as last built, with the segments assigned to them since.

    `segments` counts the segments embedded so far, of which `built_segments` were part of the last
    of `builds` builds. `settings` is null when the session has no episodes.
    """

    session: str
    settings: EpisodeSettings | None
    segments: int
    built_segments: int
    builds: int
    episodes: tuple[Episode, ...]
