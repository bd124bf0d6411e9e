"""The yield protocol of turns, repairs and builds, and their wait for writes."""

from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.generation.sampling import Sampler

_T = TypeVar("_T")


@dataclass(frozen=True)
class Decode:
    """A token to append in the next batch, and the sampler of the token after it."""

    token: int
    sampler: Sampler


Yielded = Decode | None | Future[Any]
"""Yield protocol: None = yield the thread, Future = wait for it, Decode = append a token in the
next batch. The scheduler answers a `Decode` with the token sampled after it.
"""
Steps = Generator[Yielded, int, _T]
"""A job's work: a generator that the scheduler drives."""


def wait_alike(engine: Engine, done: "Future[_T]") -> Steps[_T]:
    """Wait for a future, which every rank has one of; an error of one of them is raised on all."""
    yield done
    error = done.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    if (error := engine.group.agree(error)) is not None:
        raise error
    return done.result()


def wait_for_writes(engine: Engine, session: WorkerSession) -> Steps[None]:
    """Wait until every appended row is in the store. Raises the errors of the writes."""
    if session.writes:
        yield session.writes[-1]
    engine.store_io.wait_written(session)
