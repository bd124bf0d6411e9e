"""Rendering and compiling on threads of their own: a long prompt stops no session's decoding."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvrecall.domain.answer.constraints import FREE
from kvrecall.domain.messages import Sampling
from kvrecall.domain.page_ids import count_common
from kvrecall.domain.rewrites.rewrite import Edit
from kvrecall.protocol import convert
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.sandbox.tenant_queue import QueueFull
from kvrecall.sandbox.tenant_threads import TenantThreads
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.errors import BadMessages, Overloaded
from workers.generation.steps import Steps, wait_alike
from workers.model.grammars import CompiledGrammars
from workers.model.restating import find_edits, render_messages
from workers.model.tokenizer import ChatMessage, Segment

_T = TypeVar("_T")


def render_prompt(
    engine: Engine,
    session: WorkerSession,
    messages: Sequence[ChatMessage],
    *,
    generate: bool,
    opening: str = "",
) -> Steps[list[Segment]]:
    """Render and encode messages as the session's next. Raises BadMessages."""
    recent = session.recent
    tools = list(session.config.tools)
    arguments = json.loads(session.config.options.template_arguments)
    # A thread keeps what its last job has named: not the session.
    keep_reasoning = session.config.options.keep_reasoning

    def render() -> list[Segment]:
        return render_messages(
            engine.tokenizer,
            recent,
            messages,
            tools,
            generate,
            arguments=arguments,
            opening=opening,
            keep_reasoning=keep_reasoning,
        )

    segments = yield from _off_thread(engine, engine.renderer, session.config.share.tenant, render)
    return join_turns(session.committed_pending, segments, engine.tokenizer.eos_token_ids)


def find_rewrite(
    engine: Engine,
    session: WorkerSession,
    earlier: pb.Earlier,
    messages: Sequence[ChatMessage],
) -> Steps[tuple[Edit, ...]]:
    """Find what the template says otherwise of the session's log now that `messages` follow.

    Positions are those of the session. Nothing where the template refuses the messages.
    """
    before = [convert.to_chat(message) for message in earlier.messages]
    tools = list(session.config.tools)
    arguments = json.loads(session.config.options.template_arguments)
    leading = [each for each in session.recent[:1] if each["role"] in ("system", "developer")]
    start = session.committed_tokens - len(earlier.token_ids)
    token_ids = list(earlier.token_ids)

    def find() -> tuple[Edit, ...]:
        pieces = engine.tokenizer.restate(
            before, messages, tools, leading=leading, arguments=arguments
        )
        return find_edits(engine.tokenizer, token_ids, pieces)

    try:
        edits = yield from _off_thread(engine, engine.renderer, session.config.share.tenant, find)
    except BadMessages:
        return ()
    return tuple(replace(each, start=start + each.start, stop=start + each.stop) for each in edits)


def join_turns(
    pending: Sequence[int], segments: list[Segment], ends: Sequence[int]
) -> list[Segment]:
    """Leave out the first token of a turn where the answer before it has ended with that one.

    In some templates no token ends a turn, and a model ends its answer by beginning the next turn
    (GLM: `<|user|>`, `<|observation|>`).
    """
    if not segments or not pending or pending[-1] not in ends:
        return segments
    first = segments[0]
    if first.token_ids[0] != pending[-1]:
        return segments
    rest = replace(first, token_ids=first.token_ids[1:])
    return [*([rest] if rest.token_ids else []), *segments[1:]]


def count_beginning(
    engine: Engine,
    session: WorkerSession,
    messages: Sequence[ChatMessage],
    prompt: Sequence[int],
) -> Steps[int]:
    """Count the first tokens of a session's first prompt that its system message and tools give.

    Other conversations begin with them too, so recurrent states are stored there. 0 for models without
    any, for later prompts, and for a template that does not render the system message alone.
    """
    if not engine.has_states or session.length or session.pending or len(messages) < 2:
        return 0
    if messages[0]["role"] != "system":
        return 0
    try:
        segments = yield from render_prompt(engine, session, messages[:1], generate=False)
    except BadMessages:
        return 0
    alone = [token for segment in segments for token in segment.token_ids]
    return count_common(alone, prompt)


def encode_text(engine: Engine, session: WorkerSession, text: str) -> Steps[list[int]]:
    """Encode a client's text."""
    tenant = session.config.share.tenant
    encode = partial(engine.tokenizer.encode_plain, text)
    return (yield from _off_thread(engine, engine.renderer, tenant, encode))


def build_grammars(
    engine: Engine, session: WorkerSession, sampling: Sampling
) -> Steps[CompiledGrammars]:
    """Compile the grammars of a turn's answer. Raises BadSettings for what cannot be, Overloaded.

    The vocabulary, which log-probabilities are reported by as well, is built with the first.
    """
    tools = [json.dumps(tool) for tool in session.config.tools]
    reports = (sampling.top_logprobs, sampling.prompt_logprobs) != (None, None)
    if sampling.constraint == FREE and not reports and not tools:
        return CompiledGrammars()
    if (known := engine.grammars.find(sampling.constraint, tools)) is not None:
        return known
    tenant = session.config.share.tenant

    def build() -> CompiledGrammars:
        return engine.grammars.build(sampling.constraint, tools, tenant)

    return (yield from _off_thread(engine, engine.compiler, tenant, build))


def _off_thread(
    engine: Engine, threads: TenantThreads, tenant: str, work: Callable[[], _T]
) -> Steps[_T]:
    """Run a tenant's work on another thread and wait for it. Raises the work's errors, Overloaded."""
    done: Future[_T]
    try:
        done = threads.submit(tenant, work)
    except QueueFull:
        done = Future()
        done.set_exception(Overloaded("too many turns of this tenant wait; try again later"))
    return (yield from wait_alike(engine, done))
