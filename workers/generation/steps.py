"""What the generators of turns, repairs and builds share: what they yield, how they time, what they wait for."""

import time
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from workers.engine.engine import Engine
from workers.engine.session import WorkerSession

Yielded = int | None | Future[Any]
"""None lets others run, a Future is waited for, a token id is said in the next decoding step."""


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def written(engine: Engine, session: WorkerSession) -> Generator[Yielded, Any, None]:
    """Wait until every row that was said is in the store."""
    if session.writes:
        yield session.writes[-1]
    engine.storing.settle(session)
