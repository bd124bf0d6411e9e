"""Exact rows: those that a full cache would have, since they attended to all rows before them."""

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession


def note_block(engine: Engine, resident: ResidentSession) -> None:
    """Note whether the next block, over the active rows or over some of them, gives exact rows."""
    session = resident.session
    if session.inexact_from is not None:
        return
    sparse = resident.config.prefill.sparse != "off"
    if sparse or not engine.cache.holds_all(resident.slot, session.length):
        session.inexact_from = session.length


def note_step(engine: Engine, resident: ResidentSession) -> None:
    """Note whether the next step, of one token, gives an exact row: only if it reads all rows.

    It does in every step of a method that evicts nothing, which are spared the look.
    """
    session = resident.session
    if session.inexact_from is not None or not resident.config.method.evicts:
        return
    engine.make_room(resident, 1)
    if not engine.cache.holds_all(resident.slot, session.length):
        session.inexact_from = session.length
