"""Observation of a repair's signal, block by block, and of the neutral signal of its contrast."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import structlog

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.errors import BadMessages
from workers.generation.rendering import render_prompt
from workers.generation.steps import Steps
from workers.primitives.observation import Observed
from workers.repair.scan.softmax import Contrast

_log = structlog.get_logger(__name__)


def observe_signal(
    engine: Engine,
    resident: ResidentSession,
    signal: Sequence[int],
    stop_requested: Callable[[], bool] = lambda: False,
    asked: int | None = None,
) -> Steps[Observed]:
    """Observe the signal's tokens over the active rows; yields between blocks.

    Each block runs on its own, right after the session's last row, and leaves no row. The last
    `signal_tokens` of the answer's end and the signal are observed, the last block first: one
    block always, the others until a stop is requested. With `asked` only the last so many count;
    those before them in their blocks are their context.
    """
    token_ids = [*resident.session.unread, *signal][-engine.settings.signal_tokens :]
    wanted = len(token_ids) if asked is None else min(asked, len(token_ids))
    observed: list[Observed] = []
    for block in reversed(split_evenly(token_ids, engine.settings.block_tokens)):
        if observed and (stop_requested() or sum(part.tokens for part in observed) >= wanted):
            break
        observed.insert(0, engine.observe(resident, block))
        yield None
    return Observed.concatenate(observed).last(wanted)


def observe_contrast(engine: Engine, resident: ResidentSession) -> Steps[Contrast | None]:
    """Observe the neutral signal: the chat template around an empty message of the user.

    It ends with the generation prompt, as a turn does, and says nothing in any language. Returns
    None where the session's repair has no contrast, or the template refuses an empty message.
    """
    beta = resident.config.repair.contrast
    if not beta:
        return None
    empty = [{"role": "user", "content": ""}]
    try:
        segments = yield from render_prompt(engine, resident.session, empty, generate=True)
    except BadMessages as error:
        reason = type(error.__cause__ or error).__name__  # its message may quote what is rendered
        _log.info("repair without contrast", session=resident.session.name, reason=reason)
        return None
    token_ids = [token for segment in segments for token in segment.token_ids]
    observed = yield from observe_signal(engine, resident, token_ids)
    return Contrast(observed, beta)


def split_evenly(token_ids: Sequence[int], most: int) -> list[Sequence[int]]:
    """Split tokens into as few blocks of at most `most` as possible, of nearly equal length.

    No block is a short rest: a token is observed with the tokens before it in its block.
    """
    count = -(-len(token_ids) // most)
    bounds = [len(token_ids) * i // count for i in range(count + 1)]
    return [token_ids[start:end] for start, end in pairwise(bounds)]
