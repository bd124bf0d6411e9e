"""Prefix sharing: takes other sessions' pages of the same first tokens instead of a prefill."""

from collections.abc import Sequence
from dataclasses import replace

from kvrecall.domain.page_ids import count_common, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.page_table import SharedPages
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.snapshots import count_stored, find_last
from workers.engine.stored.page_naming import get_names, name_tokens
from workers.engine.stored.stored_sessions import read_shared
from workers.errors import RowsMissing, StorageFailed
from workers.generation.steps import Steps
from workers.model.tokenizer import Segment
from workers.tasks.replay import load_rows


def take_prefix(
    engine: Engine, resident: ResidentSession, prefix: pb.Prefix, prompt: Sequence[int]
) -> Steps[int]:
    """Take the prompt's first rows from the pages of `prefix`; returns the number of tokens taken.

    They are a full cache's rows. A session that recalls takes any number, and those become active that
    evictions would have left. Any other has such rows before its first eviction alone, so no more are
    taken than the budget holds, and all of them become active.

    Of a prompt that exceeds the budget, or that is not prefilled over its active rows, whole blocks
    are taken, so that its blocks and evictions fall at the same positions as without a prefix. Of a
    model with recurrent states as many are taken as a stored state has seen.
    Nothing is taken for methods that accumulate over every query, nor if a page cannot be read. The
    store works on threads of its own meanwhile.
    """
    session = resident.session
    if session.length or session.pending or session.config.method.observation.accumulate:
        return 0
    tokens = _shareable_tokens(engine, resident, prefix, prompt)
    if not tokens:
        return 0
    pages = tokens // engine.store.layout.page_tokens
    shared = [replace(each, pages=min(each.pages, pages)) for each in read_shared(prefix.shared)]
    engine.fit_budget(session, tokens)
    session.snapshots = list(prefix.snapshots)[: count_stored(prefix.snapshots, tokens)]
    try:
        yield from _open_rows(engine, session, tokens, shared)
        yield from load_rows(engine, resident, tokens)
    except (RowsMissing, StorageFailed):
        session.snapshots = []
        yield from _open_rows(engine, session, 0, [])
        return 0
    session.shared_rows = tokens
    if session.config.method.observation.repeats_block:
        session.block = list(prompt[:tokens][-engine.settings.block_tokens :])
    return tokens


def _open_rows(
    engine: Engine, session: WorkerSession, length: int, shared: Sequence[SharedPages]
) -> Steps[None]:
    """Open the session's rows anew. Raises StaleEpoch, RowsMissing and StorageFailed."""

    def open_rows() -> None:
        epoch = session.config.epoch
        engine.stored.open_shared(session.name, epoch, length, shared, session.snapshots)

    opened = engine.store_io.submit(open_rows)
    yield opened
    opened.result()


def _shareable_tokens(
    engine: Engine, resident: ResidentSession, prefix: pb.Prefix, prompt: Sequence[int]
) -> int:
    page = engine.store.layout.page_tokens
    block = engine.settings.block_tokens
    recalls = resident.config.recalls
    budget = len(prompt) if recalls else min(resident.config.layer_rows)
    # The last tokens are prefilled in any case: their queries and logits are needed.
    last = max(1, resident.session.queries.width)
    most = min(_count_common(engine, resident, prefix, prompt) * page, budget, len(prompt) - last)
    tokens = max(0, most) // page * page
    if engine.has_states:
        return find_last(prefix.snapshots, tokens)
    if len(prompt) > budget or resident.config.prefill.enabled:
        while tokens % block:
            tokens -= page
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


def _count_common(
    engine: Engine, resident: ResidentSession, prefix: pb.Prefix, prompt: Sequence[int]
) -> int:
    """Count the first pages that the prompt has in common with the prefix."""
    names = get_names(engine.store, resident.config.row_key)
    offered = split_ids(prefix.page_ids)
    return count_common(name_tokens(names, prompt[: len(offered) * names.page_tokens]), offered)
