"""What the scheduler runs: a generator with its session, and the future in which its result is awaited."""

import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from workers.engine.session import WorkerSession
from workers.generation.decode import NextLogits
from workers.generation.steps import Yielded

Steps = Generator[Yielded, NextLogits, Any]


@dataclass(eq=False)
class Job:
    """One turn, repair or build. `token` is what it wants said next, `waiting` the future it waits for.

    `leaves_session`: when it has ended the session is as it was, whoever still wanted the result. `hurried`: a repair
    ends as soon as it can, with what it has found so far. `seated`: it needs the session in a slot.
    """

    session: str
    epoch: int
    steps: Callable[[WorkerSession], Steps]
    leaves_session: bool = False
    hurried: bool = False
    seated: bool = True
    result: "Future[Any]" = field(default_factory=Future)
    running: Steps | None = None
    token: int | None = None
    waiting: "Future[Any] | None" = None
    submitted: float = field(default_factory=time.perf_counter)
    queued_seconds: float = 0.0


def resolve(result: "Future[Any]", outcome: Any) -> bool:
    """Set a job's result or error; False when its caller has cancelled it, which may happen at any moment."""
    try:
        if isinstance(outcome, BaseException):
            result.set_exception(outcome)
        else:
            result.set_result(outcome)
    except InvalidStateError:
        result.set_running_or_notify_cancel()  # whoever waits in `concurrent.futures.wait` learns of it only now
        return False
    return True
