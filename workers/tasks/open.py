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
from workers.engine.stored.written import count_written, place_state, read_dropped
from workers.errors import RowsMissing
from workers.generation.kept_states import store_states
from workers.generation.steps import Steps
from workers.tasks.logged_tokens import fold_turns
from workers.tasks.replay import ReplayRows, replay, skip_untouched

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
    _forget_lost(engine, session, intact)
    return engine.memory(session)


def run_fork_from_state(
    engine: Engine, child: WorkerSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at the parent's committed state, over the parent's pages.

    Raises RowsMissing, StorageFailed and StaleEpoch.
    """
    state = request.state
    dropped = read_dropped(state)
    yield from _fork_store(engine, request, state.length, state.snapshots, dropped)
    engine.restore(child, request.state)
    return (yield from _finish_fork(engine, child))


def run_fork_replaying(
    engine: Engine, child: ResidentSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at an earlier turn: replay the turns over the parent's pages.

    Raises as `run_fork_from_state`.
    """
    parent = engine.sessions[request.parent]
    log = fold_turns(request.turns, engine.store.layout.page_tokens)
    yield from _fork_store(engine, request, log.rows, parent.snapshots, log.dropped)
    rows = ReplayRows(engine.store, child.session.name, {})
    yield from replay(engine, child, request.turns, rows)
    page_tokens = engine.store.layout.page_tokens
    written = count_written(log.rows, log.dropped, page_tokens)
    child.session.page_ids = parent.page_ids[: written // page_tokens]
    child.session.snapshots = parent.snapshots[: count_stored(parent.snapshots, written)]
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
    place = place_state(state.length, rebuilt.dropped, engine.store.layout.page_tokens)
    _forget_lost(engine, rebuilt, (*intact, place))
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
    place = place_state(state.length, read_dropped(state), engine.store.layout.page_tokens)
    return engine.has_states and place > 0 and place not in intact


def _forget_lost(engine: Engine, session: WorkerSession, intact: Collection[int]) -> None:
    """Forget the recurrent states that are lost, so that the session does not go back to one."""
    if engine.has_states:
        session.snapshots = [at if at in intact else 0 for at in session.snapshots]


def _is_anothers(state: pb.SessionState, shared_rows: int) -> bool:
    """Check if the state that the next turn begins with is another session's, which may have dropped it."""
    return state.length <= shared_rows


def _restore_state(engine: Engine, session: WorkerSession, state: pb.SessionState) -> Steps[None]:
    """Store the recurrent state that a replay has come to. Raises RowsMissing if it is another one's."""
    index = engine.stored.find_state(state.length, state.snapshots, read_dropped(state))
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
    engine: Engine,
    request: pb.ForkRequest,
    length: int,
    snapshots: Sequence[int],
    dropped: Sequence[range],
) -> Steps[None]:
    """Fork the parent's rows and states in the store, those of the first `length` tokens."""
    snapshots = tuple(snapshots)
    forked = engine.store_io.submit(
        lambda: engine.stored.fork(request.parent, request.spec, length, snapshots, dropped)
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
        engine.stored.open(spec, state.length, state.snapshots, read_dropped(state))
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
        yield from replay(engine, resident, turns, rows, skipped=skipped, length=length)
    if rows.missing:
        raise RowsMissing(
            f"the log of session {name} ends before its pages {_format_pages(sorted(rows.missing))}"
        )


def _format_pages(pages: Sequence[int]) -> str:
    return ", ".join(map(str, pages[:10])) + (", ..." if len(pages) > 10 else "")
