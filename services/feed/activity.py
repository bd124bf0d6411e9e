"""Counts of what happened of late, by tenant: a ring of steps, as long as the window, in this process."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.events import (
    CreationFailed,
    PagesRebuilt,
    PauseTimedOut,
    RepairFailed,
    RepairFinished,
    ServiceEvent,
    SessionMoved,
    TurnFailed,
    TurnFinished,
    TurnRetried,
)
from kvrecall.domain.reports import TurnOutcome
from services.sessions.manager import SessionManager

STEP_SECONDS = 15
STEPS = 60
# Tenants whose counts are kept; that of the one without an event for longest is replaced.
_TENANTS = 1024
_SERVER_ERRORS = 500
# Upper bounds, in seconds, of the buckets that first tokens are counted in.
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

COUNTED = (
    "turns",
    "failed_turns",
    "failed_creations",
    "retried_turns",
    "prompt_tokens",
    "output_tokens",
    "not_durable_turns",
    "repairs",
    "failed_repairs",
    "promoted",
    "in_pause_repairs",
    "timeouts",
    "rebuilt_pages",
    "moves",
    "first_tokens",
)
"""What is counted, by name."""


@dataclass(frozen=True)
class Step:
    """The counts of STEP_SECONDS from `at` on, in Unix seconds.

    `first_tokens` are the turns by the bucket of their seconds to the first token.
    """

    at: float
    counts: Counter[str] = field(default_factory=Counter)
    first_tokens: Counter[int] = field(default_factory=Counter)

    def get_quantile(self, share: float) -> float | None:
        """Return the bound that so large a share of the first tokens is below; None without any."""
        wanted = share * self.first_tokens.total()
        reached = 0
        for bucket in sorted(self.first_tokens):
            reached += self.first_tokens[bucket]
            if reached >= wanted:
                return BOUNDS[min(bucket, len(BOUNDS) - 1)]
        return None


class Activity:
    """Counts events of the sessions that are active in this process.

    `clock` returns the time in Unix seconds.
    """

    def __init__(self, sessions: SessionManager, clock: Callable[[], float] = time.time) -> None:
        self._sessions = sessions
        self._clock = clock
        self._steps: OrderedDict[str, deque[Step]] = OrderedDict()
        self.since = clock()

    def observe(self, event: ServiceEvent) -> None:
        """Count an event."""
        if isinstance(event, CreationFailed):
            # Those of the client's making count as little as requests of a wrong form.
            if event.code.http_status >= _SERVER_ERRORS:
                self._get_step(event.tenant).counts["failed_creations"] += 1
            return
        counted = count(event)
        if counted is None:
            return
        session, counts = counted
        live = self._sessions.find(session)
        if live is None:
            return
        step = self._get_step(live.tenant)
        step.counts.update(counts)
        if isinstance(event, TurnFinished) and event.timing.first_token is not None:
            step.first_tokens[get_bucket(event.timing.first_token)] += 1

    def get_steps(self, tenant: str) -> list[Step]:
        """Return the tenant's steps within the window, oldest first; empty ones are included."""
        newest = self._get_begin()
        begins = [newest - age * STEP_SECONDS for age in reversed(range(STEPS))]
        known = {step.at: step for step in self._steps.get(tenant, ())}
        return [known.get(at, Step(at)) for at in begins if at + STEP_SECONDS > self.since]

    def _get_begin(self) -> float:
        return self._clock() // STEP_SECONDS * STEP_SECONDS

    def _get_step(self, tenant: str) -> Step:
        steps = self._steps.setdefault(tenant, deque(maxlen=STEPS))
        self._steps.move_to_end(tenant)
        if len(self._steps) > _TENANTS:
            self._steps.popitem(last=False)
        at = self._get_begin()
        if not steps or steps[-1].at < at:
            steps.append(Step(at))
        return steps[-1]


def add_up(steps: Iterable[Step], at: float) -> Step:
    """Add steps up to one that begins `at`."""
    total = Step(at)
    for step in steps:
        total.counts.update(step.counts)
        total.first_tokens.update(step.first_tokens)
    return total


def count(event: ServiceEvent) -> tuple[str, dict[str, int]] | None:
    """Return the session of an event, and what it adds to the counts."""
    match event:
        case TurnFinished(outcome):
            answered = event.timing.first_token is not None
            return outcome.session, {**_count_turn(outcome), "first_tokens": int(answered)}
        case TurnFailed(session, code) if code != ErrorCode.UNKNOWN_SESSION:
            return session, {"failed_turns": 1}
        case TurnRetried():
            return event.session, {"retried_turns": 1}
        case RepairFinished(session, report):
            counts = {"repairs": 1, "promoted": report.promoted}
            return session, {**counts, "in_pause_repairs": int(report.in_pause)}
        case RepairFailed():
            return event.session, {"failed_repairs": 1}
        case PauseTimedOut(session, calls):
            return session, {"timeouts": len(calls)}
        case PagesRebuilt():
            return event.session, {"rebuilt_pages": event.pages}
        case SessionMoved():
            return event.session, {"moves": 1}
        case _:
            return None


def get_bucket(seconds: float) -> int:
    """Return the index of the first of BOUNDS that a time to the first token is not over."""
    return next((index for index, bound in enumerate(BOUNDS) if seconds <= bound), len(BOUNDS))


def _count_turn(outcome: TurnOutcome) -> dict[str, int]:
    return {
        "turns": 1,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens": outcome.output_tokens,
        "not_durable_turns": int(not outcome.durable),
    }
