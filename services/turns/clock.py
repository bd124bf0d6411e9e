"""The times of a turn."""

import time
from collections.abc import Mapping

from kvrecall.domain.events import TurnTiming
from kvrecall.domain.phases import Phase


class TurnClock:
    """Notes the moments of a turn, from its arrival on. Seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._arrived = time.monotonic()
        self._asked = 0.0
        self._starts: dict[str, float] = {Phase.WAITING: 0.0}
        self._first: float | None = None
        self._last: float | None = None
        self._commit_began: float | None = None

    @property
    def elapsed(self) -> float:
        """Seconds since the turn's arrival."""
        return time.monotonic() - self._arrived

    def seconds_since(self, moment: float | None) -> float | None:
        """Seconds from an earlier moment to the turn's arrival; None without such a moment."""
        return None if moment is None else max(0.0, self._arrived - moment)

    def begin_phase(self, phase: Phase) -> None:
        """Note that a phase of the service begins, if the turn has it."""
        self._starts[phase] = self.elapsed

    def ask_worker(self) -> None:
        """Note that a worker is asked for the turn."""
        self._asked = self.elapsed

    def place_phases(self, of_worker: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds from the turn's arrival to the beginning of each phase.

        `of_worker`: those of the worker that was asked last, from its request's arrival there.
        """
        return {**self._starts, **{name: self._asked + at for name, at in of_worker.items()}}

    def note_token(self) -> None:
        """Note that a token of the answer has come."""
        self._last = time.monotonic()
        if self._first is None:
            self._first = self._last

    def begin_commit(self) -> None:
        """Note that the turn is computed, and is committed from here on."""
        self._commit_began = time.monotonic()

    def finish(self, output_tokens: int) -> TurnTiming:
        """The times of a turn that is committed now."""
        now = time.monotonic()
        first = per_token = None
        if self._first is not None and self._last is not None:
            first = self._first - self._arrived
            if output_tokens > 1:
                per_token = (self._last - self._first) / (output_tokens - 1)
        began = now if self._commit_began is None else self._commit_began
        return TurnTiming(now - self._arrived, now - began, first, per_token)
