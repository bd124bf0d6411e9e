"""What a turn remembers: rows of other sessions, right before the message that it answers.

They were computed in their own sessions, and are seen as the rows of a text that stands before the message
are, without its prefill. The turn's own rows behind them follow from them, so they are dropped at its end and
computed again without them (`workers.generation.settling`): what a session keeps is a function of its own
tokens alone.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby

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
    """Prepare passages of other sessions, to stand before token `before` of the turn's prefill, in their order.

    They are rows where their pages are stored and the model's keys can be turned, and are computed again
    otherwise. None for a session that does not recall, which would keep them. Raises MalformedMessage.
    """
    passages = [_read_passage(each, engine.store.layout.page_tokens) for each in given]
    session = resident.session
    if not session.config.recalls:
        return None, pb.RememberedReport()
    stored = yield from _find_stored(engine, session, passages)
    first = session.length + before
    parts, prefilled = list[Tensor | Sequence[int]](), 0
    for has_rows, group in groupby(zip(passages, stored, strict=True), lambda pair: pair[1]):
        own = [passage for passage, _ in group]
        rows = (yield from _read_rows(engine, session, own, first)) if has_rows else None
        said = [token for passage, _ in own for token in passage.token_ids]
        parts.append(said if rows is None else rows)
        prefilled += 0 if rows is not None else len(said)
        first += len(said)
    splice = Splice(before, parts)
    engine.metrics.inc("worker_remembered_tokens_total", splice.tokens)
    report = pb.RememberedReport(
        passages=len(passages), tokens=splice.tokens, prefilled_tokens=prefilled
    )
    return splice, report


def fit_passages(given: Sequence[pb.Passage], tokens: int) -> Sequence[pb.Passage]:
    """Keep the last of the passages, which are the nearest, that have at most so many tokens in all."""
    held = list(accumulate(each.stop - each.start for each in reversed(given)))
    fitting = sum(each <= tokens for each in held)
    return given[len(given) - fitting :]


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
    """Read the ids of a passage's pages. Raises MalformedMessage if they or its tokens are not its own."""
    ids = read_ids(passage.page_ids)
    pages = len(range(passage.start // page_tokens, -(-passage.stop // page_tokens)))
    if passage.start >= passage.stop or len(ids) not in (0, pages):
        raise MalformedMessage(
            f"a passage of tokens {passage.start} to {passage.stop} is in {pages} pages of {page_tokens}, "
            f"got {len(ids)}"
        )
    if len(passage.token_ids) != passage.stop - passage.start:
        raise MalformedMessage(
            f"a passage of tokens {passage.start} to {passage.stop} has {passage.stop - passage.start}, got "
            f"{len(passage.token_ids)}"
        )
    return passage, ids


def _find_stored(
    engine: Engine, session: WorkerSession, passages: Sequence[_Passage]
) -> Steps[list[bool]]:
    """Find which passages every rank has all pages of; none where the session could not place their rows."""
    if not engine.long_sessions.can_place(session.config):
        return [False] * len(passages)

    def find() -> tuple[bool, ...]:
        return tuple(bool(ids) and all(engine.store.contains(ids)) for _, ids in passages)

    try:
        own = yield from wait_alike(engine, engine.store_io.submit(find))
    except StorageFailed:
        return [False] * len(passages)
    return [all(found) for found in zip(*engine.group.gather(own), strict=True)]


def _read_rows(
    engine: Engine, session: WorkerSession, passages: Sequence[_Passage], first: int
) -> Steps[Tensor | None]:
    """Read the passages' rows, `[n_layers, parts, n_kv_heads, t, head_dim]`, turned to stand from `first` on.

    None if a page cannot be read.
    """
    tokens = engine.store.layout.page_tokens
    pages, positions, computed = list[PageId](), list[Tensor](), list[int]()
    for passage, ids in passages:
        offset = len(pages) * tokens - passage.start // tokens * tokens
        positions.append(torch.arange(passage.start + offset, passage.stop + offset))
        computed += range(passage.start, passage.stop)
        pages += ids
    read = engine.store_io.read_pages(session, pages, torch.cat(positions))
    try:
        rows = yield from wait_alike(engine, read)
    except (RowsMissing, StorageFailed):
        return None
    return engine.long_sessions.turn_rows(rows, computed, first)
