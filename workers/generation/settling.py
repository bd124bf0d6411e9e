"""Settling: a turn begins at a page boundary, and the tokens behind it are computed again as blocks.

A turn keeps whole pages of rows, and none of other sessions'. The tokens behind the last of them are pending.
Blocks of a session that recalls attend to every stored row, but an answer's steps to the active rows and those
that they retrieve. Their rows would differ from a full cache's, and so would all later ones: such a session
keeps the rows before the first of them. Whole pages of pending tokens are computed in the pause, or before
anything else in the next turn: by the same blocks over the same rows, so with the same bits.
"""

from collections.abc import Sequence

from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.truncation import truncate
from workers.generation.kept_states import store_states
from workers.generation.prefill import prefill
from workers.generation.steps import Steps


def end_rows(
    engine: Engine, resident: ResidentSession, start: int, token_ids: Sequence[int]
) -> None:
    """Evict down to the budget, and drop the rows behind the last whole page.

    A session that recalls keeps exact rows alone, and one with recurrent states those before the last
    state that is kept. start: rows before the turn, which stay. token_ids:
    all of the session's from there on. Those without rows are pending.
    """
    session = resident.session
    computed = session.length
    kept = computed
    if resident.config.recalls and session.inexact_from is not None:
        kept = min(computed, session.inexact_from)
    if engine.has_states:
        kept = min(kept, session.snapshot.position)
    length = max(start, kept - kept % engine.store.layout.page_tokens)
    drop_rows(engine, resident, length)
    store_states(engine, session)
    session.pending = list(token_ids[length - start :])
    session.unsettled = computed - session.remembered - length


def drop_rows(engine: Engine, resident: ResidentSession, length: int) -> None:
    """Evict down to the budget, and drop the rows from position `length` on.

    In this order, so that there is room for the dropped rows when their tokens are computed again.
    """
    engine.evict(resident, turn_over=True)
    truncate(engine.caches, resident, length)
    drop_stored(engine, resident.session)


def drop_stored(engine: Engine, session: WorkerSession) -> None:
    """Let the stored session end where the session does; what is behind stays in the tiers."""
    if session.stored:
        session.unnamed = []
        del session.page_ids[session.length // engine.store.layout.page_tokens :]
        session.snapshots = [at for at in session.snapshots if at <= session.length]
        engine.store_io.truncate(session, session.length)


def settle(
    engine: Engine, resident: ResidentSession, source: LayerSource | None = None
) -> Steps[int]:
    """Compute the pending tokens that fill pages; returns their number.

    source: of the stored rows, the engine's store unless given. Raises the errors of the store.
    """
    session = resident.session
    pending, unsettled = session.pending, session.unsettled
    due = len(pending) - len(pending) % engine.store.layout.page_tokens
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
    session.unsettled = max(0, unsettled - due)
    session.clear_turn()
    return due
