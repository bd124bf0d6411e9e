"""The first words of a session, where another one has said the same: its pages are taken, and not prefilled again."""

from collections.abc import Sequence

from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.format.page_table import SharedPages
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.engine.store_io import storage
from workers.errors import RowsMissing, StorageFailed
from workers.model.tokenizer import Segment
from workers.tasks.replay import take_rows


def take_prefix(
    engine: Engine, session: WorkerSession, prefix: wire.Prefix, prompt: Sequence[int]
) -> int:
    """Make as many of the prompt's first rows active as `prefix` has whole pages of; how many tokens that are.

    Only rows before the first eviction are the same in both sessions, so no more are taken than the budget holds. A
    prompt that will be evicted from gives up a part of a block, too: its evictions then fall where they would without.
    Nothing is taken by methods that look at every query, nor where a page cannot be read.
    """
    if session.length or session.pending or session.method.observation.accumulate:
        return 0
    page = engine.store.layout.page_tokens
    block = engine.settings.block_tokens
    least = min(session.layer_rows)
    # The last words are said here in any case: what is observed of the prompt, and the first token, follow from them.
    most = min(_same(prompt, prefix.token_ids), least, len(prompt) - max(1, session.queries.width))
    tokens = max(0, most) // page * page
    if len(prompt) > least:
        while tokens % block:
            tokens -= page
    if not tokens:
        return 0
    try:
        with storage():
            shared = [SharedPages(prefix.owner, tokens // page)]
            engine.store.open(session.name, epoch=session.epoch, length=tokens, shared=shared)
        take_rows(engine, session, tokens)
    except (RowsMissing, StorageFailed):
        with storage():
            engine.store.open(session.name, epoch=session.epoch, length=0)
        return 0
    if session.method.observation.repeats_block:
        session.block = list(prompt[:tokens][-block:])
    return tokens


def after(segments: Sequence[Segment], tokens: int) -> list[Segment]:
    """The segments without their first tokens."""
    left = []
    for segment in segments:
        gone = min(tokens, len(segment.token_ids))
        tokens -= gone
        if gone < len(segment.token_ids):
            left.append(Segment(segment.token_ids[gone:], segment.recorded))
    return left


def _same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return min(len(ours), len(theirs))
