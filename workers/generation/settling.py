"""Settling: a turn begins at a page boundary, and the tokens behind it are computed again as blocks.

A turn keeps whole pages of rows. The tokens behind the last of them are pending. Blocks of a session
that recalls attend to every stored row, but an answer's steps to the active rows and those that they
retrieve. Their rows would differ from a full cache's, and so would all later ones: such a session keeps
the rows before the first of them. Whole pages of pending tokens are computed in the pause, or before
anything else in the next turn: by the same blocks over the same rows, so with the same bits.
"""

from collections.abc import Sequence

from kvrecall.domain.page_ids import PageNames
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


def end_rows(
    engine: Engine, resident: ResidentSession, start: int, token_ids: Sequence[int]
) -> None:
    """Evict down to the budget, and drop the rows behind the last whole page of exact ones.

    start: rows before the turn, which stay. token_ids: all of the session's from there on. Those
    without rows are pending.
    """
    session = resident.session
    computed = session.length
    exact = computed if session.inexact_from is None else min(computed, session.inexact_from)
    length = max(start, exact - exact % engine.store.layout.page_tokens)
    _name_pages(engine, resident, token_ids[: length - start])
    drop_rows(engine, resident, length)
    session.pending = list(token_ids[length - start :])
    session.unsettled = computed - length


def drop_rows(engine: Engine, resident: ResidentSession, length: int) -> None:
    """Evict down to the budget, and drop the rows from position `length` on.

    In this order, so that there is room for the dropped rows when their tokens are computed again.
    """
    engine.evict(resident, turn_over=True)
    truncate(engine.cache, resident, length)
    if resident.session.stored:
        engine.store_io.truncate(resident.session, length)


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
    _name_pages(engine, resident, pending[:due])
    engine.usage.recount(session.name, "settled", due)
    session.pending = pending[due:]
    session.unsettled = max(0, unsettled - due)
    session.clear_turn()
    return due


def _name_pages(engine: Engine, resident: ResidentSession, token_ids: Sequence[int]) -> None:
    """Name the session's next pages, whose rows are those of `token_ids`.

    They are a full cache's where the session recalls, or where nothing was ever evicted: all rows are
    active still.
    """
    session, config = resident.session, resident.config
    holds_all = engine.cache.holds_all(resident.slot, session.length)
    exact = config.recalls or (holds_all and config.prefill.sparse == "off")
    last = session.page_ids[-1] if session.page_ids else None
    names = PageNames(config.row_key, engine.store.row_layout, engine.store.layout.page_tokens)
    session.page_ids += names.extend(last, token_ids, exact=exact)
