"""Settling: a turn begins at a page boundary, and the tokens behind it are computed again as blocks.

A turn keeps whole pages of rows. The tokens behind the last of them are pending. Blocks of a session
that recalls attend to every stored row, but an answer's steps to the active rows and those that they
retrieve. Their rows would differ from a full cache's, and so would all later ones: such a session keeps
the rows before the first of them. Whole pages of pending tokens are computed in the pause, or before
anything else in the next turn: by the same blocks over the same rows, so with the same bits.
"""

from collections.abc import Sequence

from workers.engine.activation import LayerSource
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.engine.stored.page_naming import get_names
from workers.engine.stored.written import get_last_id
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
    _name_pages(engine, resident, token_ids[: length - start])
    drop_rows(engine, resident, length)
    store_states(engine, session)
    session.pending = list(token_ids[length - start :])
    session.unsettled = computed - length


def drop_rows(engine: Engine, resident: ResidentSession, length: int) -> None:
    """Evict down to the budget, and drop the rows from position `length` on.

    In this order, so that there is room for the dropped rows when their tokens are computed again.
    """
    engine.evict(resident, turn_over=True)
    truncate(engine.caches, resident, length)
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

    Rows that are stored already have names.
    """
    session = resident.session
    if not session.stored:
        return
    names = get_names(engine.store, resident.config.row_key)
    named = (len(session.page_ids) - sum(map(len, session.dropped))) * names.page_tokens
    exact = len(token_ids)
    if session.inexact_from is not None:
        exact = min(exact, session.inexact_from - named)
    exact -= exact % names.page_tokens
    for part, is_exact in ((token_ids[:exact], True), (token_ids[exact:], False)):
        last = get_last_id(session)
        session.page_ids += names.extend(last, part, exact=is_exact)
