"""The signal of a repair before a turn's first token: which of its tokens the repair observes."""

from collections.abc import Sequence

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession, WorkerSession
from workers.errors import BadMessages
from workers.generation.rendering import render_prompt
from workers.generation.steps import Steps
from workers.model.tokenizer import ChatMessage, Segment


def build_signal(
    engine: Engine,
    resident: ResidentSession,
    messages: Sequence[ChatMessage],
    prompt: Sequence[int],
) -> Steps[tuple[list[int], int | None]]:
    """Build the signal of the turn's own repair, and count its tokens that ask, see `run_repair`.

    Of more tokens that ask than `turn_tokens` the first and the last half of these, without context.

    messages, prompt: of the turn, and the tokens that they are rendered to.
    """
    signal = [*resident.session.deferred_signal, *prompt]
    asked = yield from _count_asked(engine, resident.session, messages, len(prompt))
    most = resident.config.repair.turn_tokens
    asking = signal[-asked:] if asked else signal
    if len(asking) <= most:
        return signal, asked
    return [*asking[: most // 2], *asking[most // 2 - most :]], None


def defer_signal(session: WorkerSession, segments: Sequence[Segment], most: int) -> list[int]:
    """What the next repair before a turn has in its signal beside that turn's messages.

    The messages that no answer has followed yet, where this turn's repair is deferred: their last
    `most` tokens, since the next first token waits for their observation.
    """
    tokens = list(session.deferred_signal)
    for segment in segments:
        tokens = [] if segment.recorded else [*tokens, *segment.token_ids]
    return tokens[-most:]


def _count_asked(
    engine: Engine, session: WorkerSession, messages: Sequence[ChatMessage], tokens: int
) -> Steps[int | None]:
    """Count the tokens behind the last tool's result, where the user's message ends the turn.

    They ask, and the result is their context. It would take the rows of the repair for itself: the
    tokens of one more JSON object attend to those of all objects before it. None: all `tokens` ask.
    """
    results = [i for i, message in enumerate(messages) if message["role"] == "tool"]
    if not results or messages[-1]["role"] != "user":
        return None
    before = messages[: results[-1] + 1]
    try:
        segments = yield from render_prompt(engine, session, before, generate=False)
    except BadMessages:  # the template takes a result only with what follows it
        return None
    asked = tokens - sum(len(segment.token_ids) for segment in segments)
    return asked if asked > 0 else None
