"""Rendering and compiling on threads of their own: a long prompt stops no session's decoding."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import TypeVar

from kvrecall.domain.answer.constraints import FREE
from kvrecall.domain.messages import Sampling
from workers.engine.engine import Engine
from workers.engine.session import WorkerSession
from workers.generation.steps import Steps
from workers.model.grammars import CompiledGrammars
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

    def render() -> list[Segment]:
        return engine.tokenizer.prompt(
            recent, messages, tools, generate, arguments=arguments, opening=opening
        )

    return (yield from _off_thread(engine.renderer, render))


def encode_text(engine: Engine, text: str) -> Steps[list[int]]:
    """Encode a client's text."""
    return (yield from _off_thread(engine.renderer, lambda: engine.tokenizer.encode_plain(text)))


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

    def build() -> CompiledGrammars:
        return engine.grammars.build(sampling.constraint, tools)

    return (yield from _off_thread(engine.compiler, build))


def _off_thread(threads: Executor, work: Callable[[], _T]) -> Steps[_T]:
    """Run work on another thread and wait for it. Raises the errors of the work."""
    done: Future[_T] = threads.submit(work)
    yield done
    return done.result()
