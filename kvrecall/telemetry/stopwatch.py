"""Seconds by phase of a turn, and the same phases as spans."""

import time
from typing import Generic, TypeVar

from kvrecall.telemetry.spans import Moment, Value, current_span

Phase = TypeVar("Phase", bound=str)


class Stopwatch(Generic[Phase]):
    """Seconds by phase, and those from its start to each phase's first beginning.

    Each phase is recorded as a span below the current one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.starts: dict[str, float] = {}
        self._started = self._last = self._opened = time.perf_counter()
        self._moments: list[Moment] = []

    def lap(self, phase: Phase) -> None:
        """Add the time since the last lap or split to `phase`, which ends now."""
        now = self._count(phase)
        record_phase(phase, self._opened, now, self._moments)
        self._opened = now
        self._moments = []

    def split(self, phase: Phase) -> None:
        """Add the time since the last lap to `phase`, which is a moment of the next one's span."""
        self._count(phase)
        self.mark(phase)

    def mark(self, name: str, **attributes: Value) -> None:
        """Note a moment of the running phase."""
        self._moments.append(Moment(name, time.time(), attributes))

    def _count(self, phase: Phase) -> float:
        now = time.perf_counter()
        self.starts.setdefault(phase, self._last - self._started)
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
        return now


def record_phase(
    name: str, start: float, end: float, moments: list[Moment] | tuple[Moment, ...] = ()
) -> None:
    """Record a phase between two times of `time.perf_counter` below the current span."""
    epoch = time.time() - time.perf_counter()
    current_span().record(name, epoch + start, epoch + end, moments=moments)
