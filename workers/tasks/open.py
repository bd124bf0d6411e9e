"""Opens a session in a worker: as committed, forked from another one, or rebuilt after a loss.

Each is a job of the scheduler on an empty session, so that the store's reads and writes hold up no
other session.
"""

import time
from collections.abc import Collection, Sequence

import structlog

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.snapshots import count_stored
from workers.engine.stored.store_io import map_store_errors
from workers.errors import RowsMissing
from workers.generation.kept_states import store_states
from workers.generation.steps import Steps
from workers.tasks.replay import ReplayRows, replay, rows_after, skip_untouched

_log = structlog.get_logger(__name__)


def run_open(
    engine: Engine, session: WorkerSession, request: pb.OpenRequest
) -> Steps[pb.MemoryReport]:
    """Restore an empty session to its committed state. Raises RowsMissing and StaleEpoch."""
    missing = yield from _open_store(engine, request.spec, request.state)
    if missing:
        raise RowsMissing(
            f"session {session.name} has lost pages {_format_pages(missing)}; "
            "they must be computed again"
        )
    intact = engine.stored.find_intact(session.name, request.state.snapshots)
    if _lacks_state(engine, request.state, intact):
        raise RowsMissing(
            f"session {session.name} has lost its recurrent state; it must be computed again"
        )
    engine.restore(session, request.state)
    return engine.memory(session)


def run_fork_from_state(
    engine: Engine, child: WorkerSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at the parent's committed state, over the parent's pages.

    Raises RowsMissing, StorageFailed and StaleEpoch.
    """
    yield from _fork_store(engine, request, request.state.length, request.state.snapshots)
    engine.restore(child, request.state)
    return (yield from _finish_fork(engine, child))


def run_fork_replaying(
    engine: Engine, child: ResidentSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at an earlier turn: replay the turns over the parent's pages.

    Raises as `run_fork_from_state`.
    """
    parent = engine.sessions[request.parent]
    length = rows_after(request.turns)
    yield from _fork_store(engine, request, length, parent.snapshots)
    rows = ReplayRows(engine.store, child.session.name, {})
    yield from replay(engine, child, request.turns, rows)
    pages = child.session.length // engine.store.layout.page_tokens
    child.session.page_ids = parent.page_ids[:pages]
    child.session.snapshots = parent.snapshots[: count_stored(parent.snapshots, length)]
    child.session.stored = True
    child.session.dirty = False
    store_states(engine, child.session)
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
    yield from _open_store(engine, spec, state)
    search = engine.store_io.submit(lambda: _find_lost(engine, session.name, state))
    yield search
    lost, intact = search.result()
    lacks_state = _lacks_state(engine, state, intact)
    losses = len(lost) + lacks_state
    engine.lost_pages += losses
    session.snapshots = list(state.snapshots)
    if lost or lacks_state:
        length = state.length if lacks_state else 0
        yield from _replay_lost(engine, resident, request.turns, lost, length, intact)
    if lacks_state:
        yield from _restore_state(engine, session, state)
    flushed = engine.store_io.flush(session)  # also pages that only memory still had
    yield flushed
    flushed.result()
    engine.rebuilt_pages += losses
    rebuilt = engine.create_empty(spec, state)
    engine.restore(rebuilt, state)
    seconds = time.perf_counter() - started
    states = int(lacks_state and not _is_anothers(state, rebuilt.shared_rows))
    _log.warning(
        "pages rebuilt", session=rebuilt.name, pages=lost, states=states, seconds=round(seconds, 3)
    )
    return pb.RebuildResult(pages=len(lost), seconds=seconds, memory=engine.memory(rebuilt))


def _find_lost(
    engine: Engine, name: str, state: pb.SessionState
) -> tuple[list[int], tuple[int, ...]]:
    """Read all that is stored of a session: its lost pages, and the positions of its intact states."""
    lost = engine.store.repair_pages(name)
    return lost, engine.stored.find_intact(name, state.snapshots, verify=True)


def _lacks_state(engine: Engine, state: pb.SessionState, intact: Collection[int]) -> bool:
    """Check if the recurrent state that the next turn begins with is lost."""
    return engine.has_states and state.length > 0 and state.length not in intact


def _is_anothers(state: pb.SessionState, shared_rows: int) -> bool:
    """Check if the state that the next turn begins with is another session's, which may have dropped it."""
    return state.length <= shared_rows


def _restore_state(engine: Engine, session: WorkerSession, state: pb.SessionState) -> Steps[None]:
    """Store the recurrent state that a replay has come to. Raises RowsMissing if it is another one's."""
    index = engine.stored.find_state(state.length, state.snapshots)
    side = engine.caches.side
    if index is None or session.snapshot.position != state.length:
        raise RowsMissing(
            f"the log of session {session.name} does not lead to its recurrent state after "
            f"{state.length} tokens"
        )
    assert side is not None, "a model with states"
    assert side.states is not None, "a model with states"
    packed = side.states.pack(session.snapshot.state)
    restored = engine.store_io.submit(
        lambda: engine.stored.restore_state(session.name, index, packed)
    )
    yield restored
    restored.result()


def _fork_store(
    engine: Engine, request: pb.ForkRequest, length: int, snapshots: Sequence[int]
) -> Steps[None]:
    """Fork the parent's rows and states in the store, those of the first `length` tokens."""
    snapshots = tuple(snapshots)
    forked = engine.store_io.submit(
        lambda: engine.stored.fork(request.parent, request.spec, length, snapshots)
    )
    yield forked
    forked.result()


def _finish_fork(engine: Engine, child: WorkerSession) -> Steps[pb.ForkResult]:
    yield engine.store_io.flush(child)
    engine.store_io.wait_written(child)
    return pb.ForkResult(memory=engine.memory(child), state=engine.snapshot(child))


def _open_store(engine: Engine, spec: pb.SessionSpec, state: pb.SessionState) -> Steps[list[int]]:
    """Open the session's rows; returns the pages that are known to be lost without reading them."""

    def open_rows() -> list[int]:
        engine.stored.open(spec, state.length, state.snapshots)
        return engine.store.missing_pages(spec.session)

    opened = engine.store_io.submit(open_rows)
    yield opened
    return opened.result()


def _replay_lost(
    engine: Engine,
    resident: ResidentSession,
    turns: Sequence[pb.LoggedTurn],
    lost: Sequence[int],
    length: int,
    intact: Collection[int],
) -> Steps[None]:
    """Replay turns until the lost pages are restored, and to the state after `length` rows.

    From a turn's end before, of models with recurrent states from one with an intact state. Raises
    RowsMissing if the log ends before.
    """
    name = resident.session.name
    rows = ReplayRows(engine.store, name, dict.fromkeys(lost))
    stop = min(lost) * engine.store.layout.page_tokens if lost else length
    skipped = yield from skip_untouched(engine, resident, turns, stop, intact)
    with map_store_errors():
        yield from replay(engine, resident, turns[skipped:], rows, length=length)
    if rows.missing:
        raise RowsMissing(
            f"the log of session {name} ends before its pages {_format_pages(sorted(rows.missing))}"
        )


def _format_pages(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:10])) + (", ..." if len(pages) > 10 else "")
