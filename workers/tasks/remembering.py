"""What a turn remembers: rows of other sessions, right before the message that it answers.

They were computed in their own sessions, and are seen as the rows of a text that stands before the message
are, without its prefill. The turn's own rows behind them follow from them, so they are dropped at its end and
computed again without them (`workers.generation.settling`): what a session keeps is a function of its own
tokens alone.
"""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from kvrecall.domain.page_ids import PageId, count_common
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.engine.stored.page_naming import read_ids
from workers.errors import BadMessages, MalformedMessage, RowsMissing, StorageFailed
from workers.generation.rendering import render_prompt
from workers.generation.splice import Splice
from workers.generation.steps import Steps, wait_alike
from workers.model.tokenizer import ChatMessage

_Passage = tuple[pb.Passage, tuple[PageId, ...]]


def prepare_splice(
    engine: Engine, resident: ResidentSession, given: Sequence[pb.Passage], before: int
) -> Steps[tuple[Splice | None, pb.RememberedReport]]:
    """Read passages of other sessions, to stand before token `before` of the turn's prefill, in their order.

    Those whose pages are not stored are left out. None where none is left, and for a session or a model
    that cannot see rows at other places than they were computed at. Raises MalformedMessage.
    """
    tokens = engine.store.layout.page_tokens
    passages = [_read_passage(each, tokens) for each in given]
    report = pb.RememberedReport(left_out=len(passages))
    session = resident.session
    if not engine.long_sessions.can_place(session.config):
        return None, report
    try:
        stored = yield from _find_stored(engine, passages)
        if not stored:
            return None, report
        rows = yield from _read_rows(engine, session, stored)
    except (RowsMissing, StorageFailed):
        return None, report
    computed = [at for passage, _ in stored for at in range(passage.start, passage.stop)]
    turned = engine.long_sessions.turn_rows(rows, computed, session.length + before)
    engine.metrics.inc("worker_remembered_tokens_total", len(computed))
    report = pb.RememberedReport(
        passages=len(stored), tokens=len(computed), left_out=len(passages) - len(stored)
    )
    return Splice(before, turned), report


def count_before_last(
    engine: Engine,
    session: WorkerSession,
    messages: Sequence[ChatMessage],
    prompt: Sequence[int],
) -> Steps[int]:
    """Count the tokens of a session's first prompt that come before its last message.

    As many as there are sinks at least: heads attend to the first rows of all where nothing else fits, so
    nothing comes before these (StreamingLLM). 0 for later prompts.
    """
    if session.length or session.pending:
        return 0
    sinks = min(engine.settings.sinks, len(prompt) - 1)
    if len(messages) < 2:
        return sinks
    try:
        segments = yield from render_prompt(engine, session, messages[:-1], generate=False)
    except BadMessages:
        return sinks
    alone = [token for segment in segments for token in segment.token_ids]
    return max(sinks, min(count_common(alone, prompt), len(prompt) - 1))


def _read_passage(passage: pb.Passage, page_tokens: int) -> _Passage:
    """Read the ids of a passage's pages. Raises MalformedMessage if they are not those of its tokens."""
    ids = read_ids(passage.page_ids)
    first, stop = passage.start // page_tokens, -(-passage.stop // page_tokens)
    if passage.start >= passage.stop or len(ids) != stop - first:
        raise MalformedMessage(
            f"a passage of tokens {passage.start} to {passage.stop} is in {stop - first} pages of "
            f"{page_tokens}, got {len(ids)}"
        )
    return passage, ids


def _find_stored(engine: Engine, passages: Sequence[_Passage]) -> Steps[list[_Passage]]:
    """Find the passages of which every rank has all pages."""

    def find() -> tuple[bool, ...]:
        return tuple(all(engine.store.contains(ids)) for _, ids in passages)

    own = yield from wait_alike(engine, engine.store_io.submit(find))
    everywhere = [all(found) for found in zip(*engine.group.gather(own), strict=True)]
    return list(compress(passages, everywhere))


def _read_rows(
    engine: Engine, session: WorkerSession, passages: Sequence[_Passage]
) -> Steps[Tensor]:
    """Read the passages' rows, `[n_layers, parts, n_kv_heads, t, head_dim]`. Raises RowsMissing, StorageFailed."""
    tokens = engine.store.layout.page_tokens
    pages, positions = list[PageId](), list[Tensor]()
    for passage, ids in passages:
        offset = len(pages) * tokens - passage.start // tokens * tokens
        positions.append(torch.arange(passage.start + offset, passage.stop + offset))
        pages += ids
    read = engine.store_io.read_pages(session, pages, torch.cat(positions))
    return (yield from wait_alike(engine, read))
