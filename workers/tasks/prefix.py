"""Prefix sharing: takes another session's pages of the same first tokens instead of a prefill."""

from collections.abc import Sequence

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.format.commit_history import CommitHistory, CommitPoint
from kvstore.format.page_table import SharedPages
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.errors import RowsMissing, StorageFailed
from workers.generation.steps import Steps
from workers.model.tokenizer import Segment
from workers.tasks.replay import load_rows


def take_prefix(
    engine: Engine, resident: ResidentSession, prefix: pb.Prefix, prompt: Sequence[int]
) -> Steps[int]:
    """Take the prompt's first rows from the pages of `prefix`; returns the number of tokens taken.

    Only rows before the first eviction are the same in both sessions, so no more are taken than the
    budget holds, and all of them become active. Where blocks attend to every stored row, whatever is
    active, and evictions select by position, any number is taken, and those rows become active that
    evictions would have left.

    Of a prompt that exceeds the budget, or that is not prefilled over its active rows, whole blocks
    are taken, so that its blocks and evictions fall at the same positions as without a prefix.
    Nothing is taken for methods that accumulate over every query, nor if a page cannot be read. The
    store works on threads of its own meanwhile.
    """
    session = resident.session
    if session.length or session.pending or session.config.method.observation.accumulate:
        return 0
    tokens = _shareable_tokens(engine, resident, prefix, prompt)
    if not tokens:
        return 0
    page = engine.store.layout.page_tokens
    committed = CommitHistory([CommitPoint(prefix.epoch, tokens)])
    shared = [SharedPages(prefix.owner, tokens // page, committed)]
    engine.fit_budget(session, tokens)
    try:
        yield from _open_rows(engine, session, tokens, shared)
        yield from load_rows(engine, resident, tokens)
    except (RowsMissing, StorageFailed):
        yield from _open_rows(engine, session, 0, [])
        return 0
    if session.config.method.observation.repeats_block:
        session.block = list(prompt[:tokens][-engine.settings.block_tokens :])
    return tokens


def _open_rows(
    engine: Engine, session: WorkerSession, length: int, shared: Sequence[SharedPages]
) -> Steps[None]:
    """Open the session's rows anew. Raises StaleEpoch, RowsMissing and StorageFailed."""

    def open_rows() -> None:
        engine.store.open(session.name, epoch=session.config.epoch, length=length, shared=shared)

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
    most = min(_common_prefix(prompt, prefix.token_ids), budget, len(prompt) - last)
    tokens = max(0, most) // page * page
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


def _common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Count the first tokens that two sequences have in common."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return min(len(ours), len(theirs))
