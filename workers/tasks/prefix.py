"""Prefix sharing: takes stored pages of the same first tokens instead of a prefill, whoever wrote them."""

from collections.abc import Sequence

from kvrecall.domain.page_ids import PageId
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.snapshots import find_last
from workers.engine.stored.page_naming import get_names, name_tokens
from workers.errors import RowsMissing, StorageFailed
from workers.generation.steps import Steps, wait_alike
from workers.model.tokenizer import Segment
from workers.parallel.common import find_common
from workers.tasks.replay import load_rows


def take_prefix(engine: Engine, resident: ResidentSession, prompt: Sequence[int]) -> Steps[int]:
    """Take the first rows of a session's first prompt from stored pages; returns the tokens taken.

    They are a full cache's rows. A session that recalls takes any number, and those become active that
    evictions would have left. Any other has such rows before its first eviction alone, so no more are
    taken than the budget holds, and all of them become active.

    Where the last rows depend on how the prompt is cut into blocks, since blocks are sparse or evictions
    choose by attention, whole blocks are taken. Of a model with recurrent states as many are taken as a
    stored state has seen.
    Nothing is taken for methods that accumulate over every query, nor if a page cannot be read. The
    store works on threads of its own meanwhile.
    """
    session = resident.session
    config = resident.config
    if config.method.observation.accumulate:
        return 0
    if not config.row_key:  # of a caller that has no tenants
        return 0
    names = get_names(engine.store, config.row_key)
    pages = name_tokens(names, prompt[: _count_shareable(engine, resident, prompt)])
    if not pages:
        return 0
    try:
        positions = yield from _find_stored(engine, pages)
        tokens = _round(engine, resident, prompt, positions)
        if not tokens:
            return 0
        engine.fit_budget(session, tokens)
        taken = pages[: tokens // engine.store.layout.page_tokens]
        states = [at for at in positions if at <= tokens] if engine.has_states else []
        yield from _open_rows(engine, session, taken, states)
        yield from load_rows(engine, resident, tokens)
    except (RowsMissing, StorageFailed):
        yield from _open_rows(engine, session, [], [])
        return 0
    if session.config.method.observation.repeats_block:
        session.block = list(prompt[:tokens][-engine.settings.block_tokens :])
    return tokens


def skip_tokens(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """The segments without their first `tokens` tokens."""
    remaining = []
    for segment in segments:
        skipped = min(tokens, len(segment.token_ids))
        tokens -= skipped
        if skipped < len(segment.token_ids):
            remaining.append(Segment(segment.token_ids[skipped:], segment.recorded))
    return remaining


def _count_shareable(engine: Engine, resident: ResidentSession, prompt: Sequence[int]) -> int:
    """Count the first tokens that may be taken, as far as the prompt and the budget allow."""
    budget = len(prompt) if resident.config.recalls else min(resident.config.layer_rows)
    # The last tokens are prefilled in any case: their queries and logits are needed.
    last = max(1, resident.session.queries.width)
    return max(0, min(budget, len(prompt) - last))


def _find_stored(engine: Engine, pages: Sequence[PageId]) -> Steps[list[int]]:
    """Find where a session may begin behind stored pages: the numbers of its rows, ascending."""
    page_tokens = engine.store.layout.page_tokens

    def find() -> list[int]:
        stored = pages[: engine.stored.find_prefix(pages)]
        if engine.has_states:
            return engine.stored.find_states(stored)
        return [page_tokens * len(stored)]

    found = engine.store_io.submit(find)
    own = yield from wait_alike(engine, found)
    return find_common(engine.group, own) if engine.has_states else min(engine.group.gather(own))


def _round(
    engine: Engine, resident: ResidentSession, prompt: Sequence[int], positions: Sequence[int]
) -> int:
    """Choose how many of the stored tokens are taken."""
    most = max(positions, default=0)
    if engine.has_states:
        return find_last(positions, most)
    page, block = engine.store.layout.page_tokens, engine.settings.block_tokens
    config = resident.config
    evicts = not config.recalls and len(prompt) > min(config.layer_rows)
    if evicts or config.prefill.sparse != "off":
        while most % block:
            most -= page
    return most


def _open_rows(
    engine: Engine, session: WorkerSession, pages: Sequence[PageId], states: Sequence[int]
) -> Steps[None]:
    """Open the session's rows anew. Raises RowsMissing and StorageFailed."""
    key = session.config.page_key
    opened = engine.store_io.submit(lambda: engine.stored.open(session.name, pages, states, key))
    yield from wait_alike(engine, opened)
    session.page_ids = list(pages)
    session.snapshots = list(states)
