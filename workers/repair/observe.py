"""Observation of a repair's signal, block by block: a signal of any length counts whole."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.steps import Steps
from workers.primitives.observation import Observed


def observe_signal(
    engine: Engine,
    resident: ResidentSession,
    signal: Sequence[int],
    stop_requested: Callable[[], bool] = lambda: False,
) -> Steps[Observed]:
    """Observe the signal's tokens over the active rows; yields between blocks.

    Each block runs on its own, right after the session's last row, and leaves no row. The last
    `signal_tokens` of the pending tokens and the signal are observed, the last block first: one
    block always, the others until a stop is requested.
    """
    token_ids = [*resident.session.pending, *signal][-engine.settings.signal_tokens :]
    observed: list[Observed] = []
    for block in reversed(split_evenly(token_ids, engine.settings.block_tokens)):
        if observed and stop_requested():
            break
        observed.insert(0, engine.observe(resident, block))
        yield None
    return Observed.concatenate(observed)


def split_evenly(token_ids: Sequence[int], most: int) -> list[Sequence[int]]:
    """Split tokens into as few blocks of at most `most` as possible, of nearly equal length.

    No block is a short rest: a token is observed with the tokens before it in its block.
    """
    count = -(-len(token_ids) // most)
    bounds = [len(token_ids) * i // count for i in range(count + 1)]
    return [token_ids[start:end] for start, end in pairwise(bounds)]
