"""What the service tells whoever watches it: values, sent to plain functions."""

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
    """A repair between two turns could not be run; unless that is `final`, it may be tried again."""

    session: str
    trigger: str
    code: str
    message: str
    final: bool


@dataclass(frozen=True)
class PauseTimedOut:
    """A session waited too long for these tool calls: the next turn tells the model that they failed."""

    session: str
    calls: tuple[str, ...]


@dataclass(frozen=True)
class EpisodesBuilt:
    """A session's episodes were built and committed; `scored_rows` and `seconds` are the worker's."""

    session: str
    episodes: int
    segments: int
    scored_rows: int
    seconds: float


@dataclass(frozen=True)
class EpisodesFailed:
    """Something about a session's episodes could not be done; no turn fails by it.

    `step` is match (the turn stays in its episode), switch (likewise), segment or build (tried again after the next
    turn).
    """

    session: str
    step: Literal["match", "switch", "segment", "build"]
    code: str
    message: str


@dataclass(frozen=True)
class PagesRebuilt:
    """A session had lost `pages`, which its worker computed again from what was said."""

    session: str
    worker: str
    pages: int
    seconds: float


@dataclass(frozen=True)
class TurnRetried:
    """A turn's worker was lost before the commit, and the turn is run again in another one."""

    session: str
    worker: str
    code: str
    message: str


@dataclass(frozen=True)
class SessionMoved:
    """A session went on in another worker because somebody asked for it."""

    session: str
    left: str
    worker: str
    seconds: float


@dataclass(frozen=True)
class SessionDeleted:
    """A session is gone."""

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
    """A tenant was refused a session, a fork or a turn: its sessions hold as much as they may."""

    tenant: str


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
    | SessionForked
    | QuotaReached
)
Observer = Callable[[ServiceEvent], None]


class EventBus:
    """Everyone who watches. An observer must neither block nor raise."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        """Tell `observer` of everything from now on."""
        self._observers.append(observer)

    def publish(self, observation: ServiceEvent) -> None:
        """Pass an observation on."""
        for observer in self._observers:
            observer(observation)
