"""Opens a session in a worker: as committed, forked at an earlier turn, or rebuilt after a loss.

Each is a job of the scheduler on an empty session, so that the store's reads and writes hold up no
other session.
"""

import time
from collections.abc import Collection, Sequence

import structlog

from kvrecall.domain.page_ids import PageId, is_random
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.page_naming import get_names, read_ids
from workers.engine.stored.store_io import map_store_errors
from workers.errors import RowsMissing
from workers.generation.kept_states import store_states
from workers.generation.steps import Steps, wait_alike
from workers.parallel.common import find_common
from workers.tasks.logged_tokens import fold_turns
from workers.tasks.replay import ReplayRows, replay, skip_untouched

_log = structlog.get_logger(__name__)


def run_open(
    engine: Engine, session: WorkerSession, request: pb.OpenRequest
) -> Steps[pb.MemoryReport]:
    """Restore an empty session to its committed state. Raises RowsMissing and StorageFailed."""
    missing = yield from _open_state(engine, session, request.state)
    if missing:
        raise RowsMissing(
            f"session {session.name} has lost pages {_format_pages(missing)}; "
            "they must be computed again"
        )
    intact = find_common(
        engine.group, engine.stored.find_intact(session.name, request.state.snapshots)
    )
    if _lacks_state(engine, request.state, intact):
        raise RowsMissing(
            f"session {session.name} has lost its recurrent state; it must be computed again"
        )
    engine.restore(session, request.state)
    _forget_lost(engine, session, intact)
    return engine.memory(session)


def run_fork(
    engine: Engine, child: ResidentSession, request: pb.ForkRequest
) -> Steps[pb.ForkResult]:
    """Fork at a turn whose state is not known: replay the turns over the pages that are still stored.

    Raises RowsMissing and StorageFailed.
    """
    session = child.session
    log = fold_turns(request.turns)
    pages = _name_log(engine, session, log.tokens[: log.rows], read_ids(request.page_ids))
    positions = yield from _find_states(engine, pages)
    missing = yield from _open_store(engine, session, pages, positions)
    intact = find_common(engine.group, engine.stored.find_intact(session.name, positions))
    session.snapshots = list(positions)
    skipped = yield from skip_untouched(engine, child, request.turns, log.rows, intact)
    rows = ReplayRows(engine.store, session.name, dict.fromkeys(missing))
    with map_store_errors():
        yield from replay(engine, child, request.turns, rows, skipped=skipped, length=log.rows)
    session.page_ids = pages
    session.stored = True
    session.dirty = False
    store_states(engine, session)
    yield engine.store_io.flush(session)
    engine.store_io.wait_written(session)
    return pb.ForkResult(memory=engine.memory(session), state=engine.snapshot(session))


def run_rebuild(
    engine: Engine, resident: ResidentSession, request: pb.RebuildRequest
) -> Steps[pb.RebuildResult]:
    """Compute lost pages again in an empty session, then restore its committed state.

    Raises RowsMissing if the log does not bring them back, and StorageFailed.
    """
    started = time.perf_counter()
    spec = request.spec
    state = request.state
    session = resident.session
    yield from _open_state(engine, session, state)
    search = engine.store_io.submit(lambda: _find_lost(engine, session.name, state))
    found, own = yield from wait_alike(engine, search)
    lost, intact = _join(engine, found), find_common(engine.group, own)
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
    yield from wait_alike(engine, flushed)
    engine.rebuilt_pages += losses
    rebuilt = engine.create_empty(spec, state)
    engine.restore(rebuilt, state)
    _forget_lost(engine, rebuilt, (*intact, state.length))
    seconds = time.perf_counter() - started
    _log.warning(
        "pages rebuilt",
        session=rebuilt.name,
        pages=lost,
        states=int(lacks_state),
        seconds=round(seconds, 3),
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


def _forget_lost(engine: Engine, session: WorkerSession, intact: Collection[int]) -> None:
    """Forget the recurrent states that are lost, so that the session does not go back to one."""
    if engine.has_states:
        for index in reversed(range(len(session.snapshots))):
            if session.snapshots[index] not in intact:
                engine.store_io.drop_state(session, index)
                del session.snapshots[index]


def _restore_state(engine: Engine, session: WorkerSession, state: pb.SessionState) -> Steps[None]:
    """Store the recurrent state that a replay has come to. Raises RowsMissing if it is another one's."""
    side = engine.caches.side
    positions = list(state.snapshots)
    if state.length not in positions or session.snapshot.position != state.length:
        raise RowsMissing(
            f"the log of session {session.name} does not lead to its recurrent state after "
            f"{state.length} tokens"
        )
    assert side is not None, "a model with states"
    assert side.states is not None, "a model with states"
    packed = side.states.pack(session.snapshot.state)
    restored = engine.store_io.submit(
        lambda: engine.stored.restore_state(session.name, positions.index(state.length), packed)
    )
    yield from wait_alike(engine, restored)


def _open_state(engine: Engine, session: WorkerSession, state: pb.SessionState) -> Steps[list[int]]:
    """Open a committed session's rows; returns the indices of the pages that are known to be lost."""
    pages = read_ids(state.page_ids)
    return (yield from _open_store(engine, session, pages, list(state.snapshots)))


def _open_store(
    engine: Engine, session: WorkerSession, pages: Sequence[PageId], states: Sequence[int]
) -> Steps[list[int]]:
    """Open a session's rows; returns the indices of the pages that are lost without reading them."""

    def open_rows() -> list[int]:
        engine.stored.open(session.name, pages, states, session.config.page_key)
        return engine.store.missing_pages(session.name)

    opened = engine.store_io.submit(open_rows)
    return _join(engine, (yield from wait_alike(engine, opened)))


def _find_states(engine: Engine, pages: Sequence[PageId]) -> Steps[list[int]]:
    """Find the states that follow some of the pages; returns the rows before each."""
    found = engine.store_io.submit(lambda: engine.stored.find_states(pages))
    return list(find_common(engine.group, (yield from wait_alike(engine, found))))


def _join(engine: Engine, lost: Sequence[int]) -> list[int]:
    """Join the ranks' lost pages: what one of them lacks all compute again, ascending."""
    return sorted(set().union(*engine.group.gather(list(lost))))


def _name_log(
    engine: Engine, session: WorkerSession, token_ids: Sequence[int], known: Sequence[PageId]
) -> list[PageId]:
    """Name the pages of a log's tokens: those whose rows are not a full cache's as they are `known`."""
    names = get_names(engine.store, session.config.row_key)
    page_tokens = names.page_tokens
    exact = next((index for index, each in enumerate(known) if is_random(each)), None)
    if exact is None:
        return list(names.extend(None, token_ids))
    kept = list(known[: len(token_ids) // page_tokens])
    rest = token_ids[len(kept) * page_tokens :]
    return engine.group.lead([*kept, *names.extend(kept[-1], rest, exact=False)])


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
