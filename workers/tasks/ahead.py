"""Prefill ahead: the beginning of a session's next prompt is computed while its tools still run.

Results that are known, and what a tool has put out so far, are the next turn's first messages. Their
blocks are those that the turn would compute: over the same rows, cut at the same tokens, so the turn goes
on behind them with the same bits. Nothing of it is committed. A turn whose prompt begins otherwise, or
that needs the session as it was committed, asks for it to be opened again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvrecall.domain.page_ids import count_common
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.capabilities import attach
from workers.engine.ahead import Ahead
from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.generation.prefill import find_whole_blocks, prefill
from workers.generation.rendering import render_prompt
from workers.generation.steps import Steps
from workers.model.tokenizer import ChatMessage, Segment
from workers.tasks.limits import get_limit

# Text that follows: tokens that differ with it are not known yet, nor are those just before them, which
# other text may join.
_MORE = " and more"
_UNSURE_TOKENS = 8


def run_ahead(
    engine: Engine,
    resident: ResidentSession,
    request: pb.PrefillAheadRequest,
    stop_requested: Callable[[], bool],
) -> Steps[pb.PrefillAheadResult]:
    """Compute the blocks that a request's messages fill. Raises BadMessages and the store's errors."""
    messages = [convert.to_chat(message) for message in request.messages]
    tokens = yield from _compute(engine, resident, messages, stop_requested)
    return pb.PrefillAheadResult(prompt_tokens=tokens)


def go_on_behind(
    engine: Engine, session: WorkerSession, prompt: Sequence[int], *, as_committed: bool
) -> Ahead | None:
    """Return what was computed of a turn's prompt, which is the turn's from now on; None if nothing was.

    as_committed: the turn needs the session as it was committed. Raises UnknownSession where that, or
    another beginning of the prompt, has the session opened again.
    """
    ahead = session.ahead
    if ahead is None:
        return None
    if as_committed or not ahead.begins(prompt):
        session.require_committed()
    session.ahead = None
    engine.metrics.inc("worker_ahead_tokens_total", len(ahead.token_ids), event="used")
    return ahead


def _compute(
    engine: Engine,
    resident: ResidentSession,
    messages: Sequence[ChatMessage],
    stop_requested: Callable[[], bool],
) -> Steps[int]:
    """Compute blocks until `stop_requested`; returns how many of the next prompt's tokens have rows.

    None while pages of pending tokens wait for `settle`.
    """
    session = resident.session
    ahead = session.ahead or Ahead(session.length, tuple(session.pending))
    page_tokens = engine.store.layout.page_tokens
    if stop_requested() or len(ahead.pending) >= page_tokens:
        return ahead.prompt_tokens
    known = yield from _render_known(engine, session, messages)
    if not ahead.begins(known):
        return ahead.prompt_tokens
    room = get_limit(engine, resident) - ahead.length
    token_ids = [*ahead.pending, *known][len(ahead.token_ids) : room]
    ends = find_whole_blocks(engine, session, len(token_ids))
    if session.ahead is None and ends:
        attach(session)
        session.clear_turn()
        session.turn_start = session.length
    start = 0
    for stop in ends:
        if stop_requested() or stop % page_tokens:
            break
        session.dirty = True
        new = token_ids[start + len(session.pending) : stop]
        yield from prefill(
            engine,
            resident,
            [Segment(tuple(new), recorded=False)],
            keep_distribution=False,
            on_prompt_end=lambda: None,
        )
        done = (*ahead.token_ids, *token_ids[start:stop])
        ahead = session.ahead = replace(ahead, token_ids=done)
        session.dirty = False
        start = stop
    engine.metrics.inc("worker_ahead_tokens_total", start, event="computed")
    return ahead.prompt_tokens


def _render_known(
    engine: Engine, session: WorkerSession, messages: Sequence[ChatMessage]
) -> Steps[list[int]]:
    """Render messages as far as their tokens do not depend on what follows."""
    last: ChatMessage = {**messages[-1], "content": f"{messages[-1]['content']}{_MORE}"}
    found = []
    for said in (messages, [*messages[:-1], last]):
        segments = yield from render_prompt(engine, session, said, generate=False)
        found.append([token for segment in segments for token in segment.token_ids])
    known, longer = found
    return known[: max(0, count_common(known, longer) - _UNSURE_TOKENS)]
