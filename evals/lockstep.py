"""Tasks of several sessions run together: their decode steps share a batch, in lockstep.

Which sessions share a step depends on the tasks alone, never on timing, so that results are
reproducible where those of a scheduler's batches are not.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from workers.engine.engine import Engine
from workers.engine.session import ResidentSession
from workers.generation.sampling import sample
from workers.generation.steps import Decode, Steps

T = TypeVar("T")


@dataclass
class _Task(Generic[T]):
    resident: ResidentSession
    steps: Steps[T]
    decoding: Decode | None = None
    result: T | None = None

    def advance(self, answer: Any) -> None:
        """Run until the task decodes or ends; wait for whatever else it yields."""
        self.decoding = None
        try:
            while not isinstance(wanted := self.steps.send(answer), Decode):
                answer = None
                if isinstance(wanted, Future):
                    wanted.result()
        except StopIteration as end:
            self.result = end.value
        else:
            self.decoding = wanted


def run_together(engine: Engine, tasks: Sequence[tuple[ResidentSession, Steps[T]]]) -> list[T]:
    """Run each session's task to its end; returns the results in order. Raises their errors."""
    running = [_Task(resident, steps) for resident, steps in tasks]
    for task in running:
        task.advance(None)
    # Neighbouring slots in ascending order are read without a copy.
    by_slot = sorted(running, key=lambda task: task.resident.slot)
    while batch := [(task, task.decoding) for task in by_slot if task.decoding is not None]:
        tokens = torch.tensor([[decoding.token] for _, decoding in batch])
        logits = engine.forward([task.resident for task, _ in batch], tokens)[:, -1]
        sampled = sample(logits, [decoding.sampler for _, decoding in batch])
        for (task, _), token in zip(batch, sampled, strict=True):
            task.advance(token)
    return [task.result for task in running if task.result is not None]
