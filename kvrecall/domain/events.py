"""Events of the service and the bus that publishes them to observers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvrecall.domain.reports import MemoryReport, RepairReport, TurnOutcome


@dataclass(frozen=True)
class TurnFinished:
    """A turn was committed."""

    outcome: TurnOutcome


@dataclass(frozen=True)
class TurnFailed:
    """A turn ended without a commit; `code` is that of the error, or `cancelled`."""

    session: str
    code: str


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
    again after the next turn).
    """

    session: str
    step: Literal["match", "switch", "segment", "build"]
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


@dataclass(frozen=True)
class SessionMoved:
    """A session was moved to another worker on request."""

    session: str
    left: str
    worker: str
    seconds: float


@dataclass(frozen=True)
class SessionDeleted:
    """A session was deleted."""

    session: str


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
class QuotaReached:
    """A session, fork or turn was refused because the tenant's quota is reached."""

    tenant: str


@dataclass(frozen=True)
class MembersIgnored:
    """A request had members of these names, which no API here knows."""

    names: tuple[str, ...]


ServiceEvent = (
    TurnFinished
    | TurnFailed
    | RepairFinished
    | RepairFailed
    | PauseTimedOut
    | EpisodesBuilt
    | EpisodesFailed
    | PagesRebuilt
    | TurnRetried
    | SessionMoved
    | SessionDeleted
    | SessionForgotten
    | SessionForked
    | QuotaReached
    | MembersIgnored
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
