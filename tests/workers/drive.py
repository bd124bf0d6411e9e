"""Running of a worker's generators to their end, without other jobs."""

from concurrent.futures import Future
from typing import TypeVar

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
