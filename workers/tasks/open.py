"""How a session comes into a worker: opened as it was committed, forked from another, or rebuilt after a loss.

Each is a job of the scheduler on a blank session, so that whatever the store has to read or write meanwhile holds up
no other session.
"""

import time
from collections.abc import Generator, Sequence
from typing import Any

import structlog

from kvrecall.protocol.v1 import worker_pb2 as wire
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.store_io import shared_pages, storage
from workers.errors import RowsMissing
from workers.generation.steps import Yielded
from workers.tasks.replay import ReplayRows, replay, rows_after, skip_untouched

Steps = Generator[Yielded, Any, Any]


def run_open(engine: Engine, session: WorkerSession, request: wire.OpenRequest) -> Steps:
    """Make a blank session be what was committed. Raises RowsMissing when pages of it are not there, StaleEpoch."""
    lost = yield from _open_store(engine, request.spec, request.state.length)
    if lost:
        raise RowsMissing(
            f"session {session.name} has lost pages {_told(lost)}; they must be computed again"
        )
    engine.fill(session, request.state)
    engine.store.prefetch(session.name)  # whoever opens a session is about to use it
    return engine.memory(session)


def run_fork(engine: Engine, session: WorkerSession, request: wire.ForkRequest) -> Steps:
    """Make a blank session be as another was, over that one's pages. Raises RowsMissing, StorageFailed, StaleEpoch."""
    spec = request.spec
    state = request.state
    length = state.length if request.HasField("state") else rows_after(request.turns)
    shared = shared_pages(spec)

    def fork() -> None:
        engine.store.fork(
            request.parent, spec.session, epoch=spec.epoch, length=length, shared=shared
        )

    forked = engine.storing.do(fork)
    yield forked
    forked.result()
    if request.HasField("state"):
        engine.fill(session, state)
    else:
        yield from replay(engine, session, request.turns)
        session.stored = True
        session.unsettled = False
    yield engine.storing.flush(session)
    engine.storing.settle(session)
    return wire.ForkResult(memory=engine.memory(session), state=engine.snapshot(session))


def run_rebuild(engine: Engine, session: WorkerSession, request: wire.RebuildRequest) -> Steps:
    """Compute lost pages again in a blank session, then make it be what was committed.

    Raises RowsMissing when the log does not bring them back, StorageFailed, StaleEpoch.
    """
    started = time.perf_counter()
    spec = request.spec
    state = request.state
    yield from _open_store(engine, spec, state.length)
    searched = engine.storing.do(lambda: engine.store.repair_pages(session.name))
    yield searched
    lost = searched.result()
    engine.lost_pages += len(lost)
    if lost:
        yield from _compute(engine, session, request.turns, lost, state.length)
    flushed = engine.storing.flush(session)  # also of pages that only memory still had
    yield flushed
    flushed.result()
    engine.rebuilt_pages += len(lost)
    whole = engine.blank(spec, state)
    engine.fill(whole, state)
    seconds = time.perf_counter() - started
    structlog.get_logger(__name__).warning(
        "pages rebuilt", session=session.name, pages=lost, seconds=round(seconds, 3)
    )
    return wire.RebuildResult(pages=len(lost), seconds=seconds, memory=engine.memory(whole))


def _open_store(
    engine: Engine, spec: wire.SessionSpec, length: int
) -> Generator[Yielded, Any, list[int]]:
    """Open the session's rows; which pages are known to be lost without reading them."""

    def opened() -> list[int]:
        engine.store.open(spec.session, epoch=spec.epoch, length=length, shared=shared_pages(spec))
        return engine.store.missing_pages(spec.session)

    opening = engine.storing.do(opened)
    yield opening
    return opening.result()


def _compute(
    engine: Engine,
    session: WorkerSession,
    turns: Sequence[wire.LoggedTurn],
    lost: Sequence[int],
    length: int,
) -> Generator[Yielded, Any, None]:
    rows = ReplayRows(engine.store, session.name, length, dict.fromkeys(lost))
    taken = skip_untouched(engine, session, turns, min(lost) * engine.store.layout.page_tokens)
    with storage():
        yield from replay(engine, session, turns[taken:], rows)
    if rows.missing:
        raise RowsMissing(
            f"the log of session {session.name} ends before its pages {_told(sorted(rows.missing))}"
        )


def _told(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:10])) + (", ..." if len(pages) > 10 else "")
