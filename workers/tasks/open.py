"""Opens a session in a worker: as committed, forked from another one, or rebuilt after a loss.

Each is a job of the scheduler on an empty session, so that the store's reads and writes hold up no
other session.
"""

import time
from collections.abc import Sequence

import structlog

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.store_io import commit_history, map_store_errors, shared_pages
from workers.errors import RowsMissing
from workers.generation.steps import Steps
from workers.tasks.replay import ReplayRows, replay, rows_after, skip_untouched

_log = structlog.get_logger(__name__)


def run_open(
    engine: Engine, session: WorkerSession, request: pb.OpenRequest
) -> Steps[pb.MemoryReport]:
    """Restore an empty session to its committed state. Raises RowsMissing and StaleEpoch."""
    missing = yield from _open_store(engine, request.spec, request.state.length)
    if missing:
        raise RowsMissing(
            f"session {session.name} has lost pages {_format_pages(missing)}; "
            "they must be computed again"
        )
    engine.restore(session, request.state)
    return engine.memory(session)


def run_fork_from_state(
    engine: Engine, child: WorkerSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at the parent's committed state, over the parent's pages.

    Raises RowsMissing, StorageFailed and StaleEpoch.
    """
    yield from _fork_store(engine, request, request.state.length)
    engine.restore(child, request.state)
    return (yield from _finish_fork(engine, child))


def run_fork_replaying(
    engine: Engine, child: ResidentSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at an earlier turn: replay the turns over the parent's pages.

    Raises as `run_fork_from_state`.
    """
    yield from _fork_store(engine, request, rows_after(request.turns))
    rows = ReplayRows(engine.store, child.session.name, {})
    yield from replay(engine, child, request.turns, rows)
    pages = child.session.length // engine.store.layout.page_tokens
    child.session.page_ids = engine.sessions[request.parent].page_ids[:pages]
    child.session.stored = True
    child.session.dirty = False
    return (yield from _finish_fork(engine, child.session))


def run_rebuild(
    engine: Engine, resident: ResidentSession, request: pb.RebuildRequest
) -> Steps[pb.RebuildResult]:
    """Compute lost pages again in an empty session, then restore its committed state.

    Raises RowsMissing if the log does not bring them back, StorageFailed and StaleEpoch.
    """
    started = time.perf_counter()
    spec = request.spec
    state = request.state
    session = resident.session
    yield from _open_store(engine, spec, state.length)
    search = engine.store_io.submit(lambda: engine.store.repair_pages(session.name))
    yield search
    lost = search.result()
    engine.lost_pages += len(lost)
    if lost:
        yield from _replay_lost(engine, resident, request.turns, lost)
    flushed = engine.store_io.flush(session)  # also pages that only memory still had
    yield flushed
    flushed.result()
    engine.rebuilt_pages += len(lost)
    rebuilt = engine.create_empty(spec, state)
    engine.restore(rebuilt, state)
    seconds = time.perf_counter() - started
    _log.warning("pages rebuilt", session=session.name, pages=lost, seconds=round(seconds, 3))
    return pb.RebuildResult(pages=len(lost), seconds=seconds, memory=engine.memory(rebuilt))


def _fork_store(engine: Engine, request: pb.ForkRequest, length: int) -> Steps[None]:
    """Fork the parent's rows in the store, the first `length` of them."""
    spec = request.spec
    shared = shared_pages(spec.shared)

    def fork() -> None:
        engine.store.fork(
            request.parent, spec.session, epoch=spec.epoch, length=length, shared=shared
        )

    forked = engine.store_io.submit(fork)
    yield forked
    forked.result()


def _finish_fork(engine: Engine, child: WorkerSession) -> Steps[pb.ForkResult]:
    yield engine.store_io.flush(child)
    engine.store_io.wait_written(child)
    return pb.ForkResult(memory=engine.memory(child), state=engine.snapshot(child))


def _open_store(engine: Engine, spec: pb.SessionSpec, length: int) -> Steps[list[int]]:
    """Open the session's rows; returns the pages that are known to be lost without reading them."""

    def open_rows() -> list[int]:
        engine.store.open(
            spec.session,
            epoch=spec.epoch,
            length=length,
            shared=shared_pages(spec.shared),
            history=commit_history(spec.history),
        )
        return engine.store.missing_pages(spec.session)

    opened = engine.store_io.submit(open_rows)
    yield opened
    return opened.result()


def _replay_lost(
    engine: Engine,
    resident: ResidentSession,
    turns: Sequence[pb.LoggedTurn],
    lost: Sequence[int],
) -> Steps[None]:
    """Replay turns until the lost pages are restored. Raises RowsMissing if the log ends before."""
    name = resident.session.name
    rows = ReplayRows(engine.store, name, dict.fromkeys(lost))
    stop = min(lost) * engine.store.layout.page_tokens
    skipped = yield from skip_untouched(engine, resident, turns, stop)
    with map_store_errors():
        yield from replay(engine, resident, turns[skipped:], rows)
    if rows.missing:
        raise RowsMissing(
            f"the log of session {name} ends before its pages {_format_pages(sorted(rows.missing))}"
        )


def _format_pages(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:10])) + (", ..." if len(pages) > 10 else "")
