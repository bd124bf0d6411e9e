"""Have faults happen to a set-up, one after another, while others speak to it."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from threading import Timer

from benchmarks.faults.faults import KINDS, Fault, NothingToHitError, Undo, schedule
from benchmarks.faults.setups import Setup

PATIENCE_SECONDS = 10.0
"""After which the fault before is undone though the next is still at work: it may keep a process from starting."""


@dataclass
class Injector:
    """Lets `count` faults happen. The schedule follows from the seed."""

    setup: Setup
    weights: Mapping[str, float]
    seed: str
    happened: Counter[str] = field(default_factory=Counter)
    _pending: list[Undo] = field(default_factory=list)

    def run(self, count: int) -> None:
        """Let so many faults happen, and undo them all."""
        try:
            for fault in schedule(self.weights, self.seed):
                if self.happened.total() >= count:
                    break
                self._happen(fault)
        finally:
            self._undo()

    def _happen(self, fault: Fault) -> None:
        time.sleep(fault.after)
        rng = Random(fault.seed)
        patience = Timer(PATIENCE_SECONDS, self._undo)
        patience.start()
        try:
            undo = KINDS[fault.kind](self.setup, rng)
        except NothingToHitError:
            return
        finally:
            patience.cancel()
        self.happened[fault.kind] += 1
        if undo is None:
            self._undo()
            return
        time.sleep(fault.seconds)
        self._undo()
        if fault.lasts:
            self._pending.append(undo)
        else:
            undo()

    def _undo(self) -> None:
        while self._pending:
            self._pending.pop()()
