"""Settling: rows that a step computed over active rows alone are computed again, as blocks.

Blocks of a session that recalls attend to every stored row, but an answer's steps to the active rows
and those that they retrieve. Their rows would differ from a full cache's, and so would all later ones.
So the turn drops them, and their tokens are pending again. They are computed in the pause, or before
anything else in the next turn: by the same blocks over the same rows, so with the same bits.
"""

from collections.abc import Sequence

from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.engine.truncation import truncate
from workers.generation.prefill import prefill
from workers.generation.steps import Steps


def note_step(engine: Engine, resident: ResidentSession) -> None:
    """Note whether the next step, of one token, reads all rows: only then is its own row exact."""
    session = resident.session
    if not resident.config.recalls or session.inexact_from is not None:
        return
    engine.make_room(resident, 1)
    if not engine.cache.holds_all(resident.slot, session.length):
        session.inexact_from = session.length


def drop_inexact(
    engine: Engine, resident: ResidentSession, start: int, token_ids: Sequence[int]
) -> None:
    """Drop the turn's rows from the first inexact one on; their tokens are pending.

    start: rows before the turn, which stay. token_ids: all of the session's from there on.
    """
    session = resident.session
    computed = session.length
    if session.inexact_from is None or session.inexact_from >= computed:
        return
    length = max(start, session.inexact_from)
    session.pending = list(token_ids[length - start :])
    session.unsettled = computed - length
    truncate(engine.cache, engine.store_io, resident, length)


def settle(
    engine: Engine, resident: ResidentSession, source: LayerSource | None = None
) -> Steps[int]:
    """Compute the unsettled tokens, which are the first pending ones; returns their number.

    source: of the stored rows, the engine's store unless given. Raises the errors of the store.
    """
    session = resident.session
    pending, due = session.pending, session.unsettled
    if not due:
        return 0
    session.dirty = True
    session.clear_turn()
    session.turn_start = session.length
    session.pending = pending[:due]
    yield from prefill(
        engine,
        resident,
        [],
        keep_distribution=False,
        on_prompt_end=lambda: None,
        source=source,
    )
    engine.usage.recount(session.name, "settled", due)
    session.pending = pending[due:]
    session.unsettled = 0
    session.clear_turn()
    return due
