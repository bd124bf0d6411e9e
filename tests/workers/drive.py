"""Running of a worker's generators to their end, without other jobs."""

from concurrent.futures import Future
from typing import TypeVar

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.prefill import prefill
from workers.generation.steps import Steps

_T = TypeVar("_T")


def drive(steps: Steps[_T]) -> tuple[_T, int]:
    """Drive a task that decodes nothing: its result, and how often it let others run."""
    yielded = 0
    while True:
        try:
            waited = next(steps)
        except StopIteration as ended:
            return ended.value, yielded
        yielded += 1
        if isinstance(waited, Future):
            waited.result()


def compute_pending(engine: Engine, name: str = "s") -> ResidentSession:
    """Compute the tokens that a turn left behind its whole pages, as the next turn begins."""
    resident = engine.swap_in(engine.session(name))
    if resident.session.pending:
        drive(prefill(engine, resident, [], keep_distribution=False, on_prompt_end=lambda: None))
    return resident
