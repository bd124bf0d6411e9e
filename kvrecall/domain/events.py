"""Events of the service and the bus that publishes them to observers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.messages import Sampling
from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.tool_calls import CallStatus


@dataclass(frozen=True)
class StateChanged:
    """A session is in another state in this process, as it is while a turn or a repair runs."""

    session: str
    state: SessionState


@dataclass(frozen=True)
class TurnStarted:
    """A turn was accepted and is about to run: an error from here on is reported within its stream.

    `replayed`: it was committed under the request's idempotency key before. Only its stream says so.
    """

    session: str
    turn: int
    replayed: bool = False


@dataclass(frozen=True)
class TurnTiming:
    """The seconds of a committed turn, as its client sees them.

    Attributes:
        total: From the arrival to the commit.
        commit: Of the commit.
        first_token: From the arrival to the first token; None without an answer.
        per_output_token: Between tokens, their mean; None with fewer than two.
    """

    total: float
    commit: float
    first_token: float | None = None
    per_output_token: float | None = None


@dataclass(frozen=True)
class TurnStart:
    """What a turn began with.

    Attributes:
        remembered_tokens: Tokens that the session had, which were not prefilled again.
        pause: Seconds since the turn that called tools, in a session that waited for their results;
            None in another session, or where another process ran that turn.
        repair_lead: Seconds since the end of the last repair; None without one in this process.
        after_pause: Whether the turn brings the results of tools.
        shared_tokens: Tokens taken from another session's pages; None where there was none to look
            for.
    """

    remembered_tokens: int = 0
    pause: float | None = None
    repair_lead: float | None = None
    after_pause: bool = False
    shared_tokens: int | None = None


@dataclass(frozen=True)
class TurnRun:
    """How a turn was run: with which sampling and method, in which worker, under which epoch."""

    sampling: Sampling
    method: str
    worker: str
    epoch: int


@dataclass(frozen=True)
class TurnFinished:
    """A turn was committed. Two reports of it are equal: a replayed turn has its outcome alone.

    `run` is for people: nothing is decided by it.
    """

    outcome: TurnOutcome
    start: TurnStart = field(default=TurnStart(), compare=False)
    timing: TurnTiming = field(default=TurnTiming(0.0, 0.0), compare=False)
    run: TurnRun | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AnswerReplayed:
    """A turn was sent again under its idempotency key, and got its recorded outcome."""

    session: str


@dataclass(frozen=True)
class TurnFailed:
    """A turn ended without a commit; `code` is that of the error, or `cancelled`."""

    session: str
    code: str


@dataclass(frozen=True)
class CreationFailed:
    """A session of a tenant could not be created; `code` is that of the error."""

    tenant: str
    code: ErrorCode


@dataclass(frozen=True)
class RepairBegan:
    """A repair between two turns was sent to the worker; `call` as in its report."""

    session: str
    trigger: str
    call: str


@dataclass(frozen=True)
class RepairFinished:
    """A repair between two turns was committed."""

    session: str
    report: RepairReport
    memory: MemoryReport


@dataclass(frozen=True)
class RepairFailed:
    """A repair between two turns could not be run.

    Unless that is `final`, it may be tried again.
    """

    session: str
    trigger: str
    code: str
    message: str
    final: bool


@dataclass(frozen=True)
class CallReported:
    """A client's report on a tool call; `type` is that of the report.

    A `late` one changed nothing: the call had its result already.
    """

    session: str
    call: str
    type: str
    status: CallStatus
    late: bool = False


@dataclass(frozen=True)
class ToolCallEnded:
    """A tool call got its result, `failed` or not.

    It began at its start's report, or else with the end of the turn that asked for it; both times
    are seconds since the epoch.
    """

    session: str
    call: str
    name: str
    began: float
    ended: float
    failed: bool


@dataclass(frozen=True)
class PauseTimedOut:
    """These tool calls timed out: the next turn presents them to the model as failed."""

    session: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class EpisodesBuilt:
    """A session's episodes were built and committed.

    `scored_rows` and `seconds` are the worker's.
    """

    session: str
    episodes: int
    segments: int
    scored_rows: int
    seconds: float


@dataclass(frozen=True)
class EpisodesFailed:
    """Something about a session's episodes could not be done; no turn fails by it.

    `step` is match (the turn stays in its episode), switch (likewise), segment or build (tried
    again after the next turn), or remember (the turn goes on without its memory).
    """

    session: str
    step: Literal["match", "switch", "segment", "build", "remember"]
    code: str
    message: str


@dataclass(frozen=True)
class PagesRebuilt:
    """A worker rebuilt a session's `pages` missing pages from the turn log."""

    session: str
    worker: str
    pages: int
    seconds: float


@dataclass(frozen=True)
class TurnRetried:
    """A turn's worker was lost before the commit; the turn is retried on another one."""

    session: str
    worker: str
    code: str
    message: str


OpenReason = Literal["first_use", "worker_lost", "other_gateway", "rollback", "move"]
"""Why a session is opened in a worker: its first use in this process, a worker that was lost, another
process that had it meanwhile, something that failed, or a move."""


@dataclass(frozen=True)
class SessionOpened:
    """A session was opened in a worker under a fresh epoch."""

    session: str
    worker: str
    reason: OpenReason


@dataclass(frozen=True)
class ClaimLost:
    """Another process took a session over while this one worked on it."""

    session: str


@dataclass(frozen=True)
class WriterFenced:
    """A write under an epoch that is no longer the session's was refused by catalog or worker."""

    where: Literal["catalog", "worker"]


@dataclass(frozen=True)
class SessionMoved:
    """A session was moved to another worker on request."""

    session: str
    left: str
    worker: str
    seconds: float


@dataclass(frozen=True)
class SessionCreated:
    """A session without a turn was created."""

    session: str


@dataclass(frozen=True)
class SessionDeleted:
    """A session of a tenant was deleted."""

    session: str
    tenant: str = ""


@dataclass(frozen=True)
class SessionForgotten:
    """An idle session is no longer kept ready in this process; its next use opens it again."""

    session: str


@dataclass(frozen=True)
class SessionForked:
    """A session was forked, at its last turn or at an earlier one."""

    session: str
    child: str
    at: Literal["last", "earlier"]
    seconds: float


@dataclass(frozen=True)
class TokensComputed:
    """A worker computed tokens for a session, whatever became of the job.

    `prefilled` in blocks, `decoded` one by one, `repaired` to observe a signal or a prompt, `settled`
    again as blocks.
    """

    session: str
    prefilled: int
    decoded: int
    repaired: int
    settled: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.prefilled + self.decoded + self.repaired + self.settled


@dataclass(frozen=True)
class QuotaReached:
    """A session, fork or turn was refused because the tenant's quota is reached."""

    tenant: str


@dataclass(frozen=True)
class MembersIgnored:
    """A request had parts that were left out or replaced.

    `names`: those under which they are counted; `text`: their places and kinds.
    """

    names: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class GrammarCompiled:
    """A grammar was compiled for a check, with or without success, in `cpu_seconds`."""

    cpu_seconds: float


ServiceEvent = (
    StateChanged
    | TurnStarted
    | TurnFinished
    | TurnFailed
    | AnswerReplayed
    | RepairBegan
    | RepairFinished
    | RepairFailed
    | CallReported
    | ToolCallEnded
    | PauseTimedOut
    | EpisodesBuilt
    | EpisodesFailed
    | PagesRebuilt
    | TurnRetried
    | SessionOpened
    | ClaimLost
    | WriterFenced
    | SessionMoved
    | CreationFailed
    | SessionCreated
    | SessionDeleted
    | SessionForgotten
    | SessionForked
    | QuotaReached
    | TokensComputed
    | MembersIgnored
    | GrammarCompiled
)
Observer = Callable[[ServiceEvent], None]


class EventBus:
    """Publishes events to observers. An observer must neither block nor raise."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Call `observer` with every event from now on."""
        self._observers.append(observer)

    def publish(self, event: ServiceEvent) -> None:
        """Call every observer with the event."""
        for observer in self._observers:
            observer(event)
