"""Recurrent states that a session keeps while it is computed, and those that are stored."""

from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.side_content import keep_snapshot
from workers.engine.snapshots import choose_dropped


def keep_states(engine: Engine, session: WorkerSession, *, shared: bool = False) -> None:
    """Keep a copy of the recurrent states that the session's slot has now, if its model has any.

    It is stored at once if rows outweigh states since the last one that is stored, and where other
    sessions may begin as well (`shared`).
    """
    side = engine.caches.side
    if side is None or side.states is None:
        return
    keep_snapshot(side, session)
    if session.keep_state is not None:
        session.keep_state(session.snapshot)
    since = session.length - max(session.snapshots, default=0)
    if shared or since >= engine.state_interval:
        store_states(engine, session)


def store_states(engine: Engine, session: WorkerSession) -> None:
    """Store the kept states, unless they are stored, and drop those that are not needed any more."""
    position = session.snapshot.position
    stored = max(session.snapshots, default=0)
    if not (engine.has_states and session.stored) or position <= stored:
        return
    engine.store_io.append_state(session, session.snapshot)
    session.snapshots.append(position)
    for index in choose_dropped(session.snapshots, engine.state_interval, session.anchor):
        engine.store_io.drop_state(session, index)
        del session.snapshots[index]
