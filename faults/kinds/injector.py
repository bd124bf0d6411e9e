"""Injects faults into a set-up, one after another, while clients use it."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from threading import Timer

from faults.kinds.base import NothingToHitError, Undo
from faults.kinds.schedule import KINDS, Fault, schedule
from faults.rig.setups import Setup

# A fault that takes longer than this has the one before it undone first: that may keep a process
# from starting.
PATIENCE_SECONDS = 10.0
# Longest wait for an answer between two faults. On a slow machine clients would get none between two
# starts, and the faults hit nothing.
_SERVED_SECONDS = 30.0
_POLL_SECONDS = 0.05


@dataclass
class Injector:
    """Injects the faults of a schedule, which follows from the seed.

    `count_answers`: of the clients' requests so far. A fault waits for one behind the fault before,
    if that is undone.
    """

    setup: Setup
    weights: Mapping[str, float]
    seed: str
    count_answers: Callable[[], int]
    happened: Counter[str] = field(default_factory=Counter)
    _pending: list[Undo] = field(default_factory=list)

    def run(self, count: int) -> None:
        """Inject `count` faults and undo them all."""
        try:
            for fault in schedule(self.weights, self.seed):
                if self.happened.total() >= count:
                    break
                self._inject(fault)
        finally:
            self._undo_pending()

    def _inject(self, fault: Fault) -> None:
        self._await_answer()
        time.sleep(fault.after)
        rng = Random(fault.seed)
        patience = Timer(PATIENCE_SECONDS, self._undo_pending)
        patience.start()
        try:
            undo = KINDS[fault.kind](self.setup, rng)
        except NothingToHitError:
            return
        finally:
            patience.cancel()
            patience.join()  # it may be undoing the fault before: two undos at once would race
        self.happened[fault.kind] += 1
        if undo is None:
            self._undo_pending()
            return
        time.sleep(fault.seconds)
        self._undo_pending()
        if fault.lasts:
            self._pending.append(undo)
        else:
            undo()

    def _await_answer(self) -> None:
        before, last = self.count_answers(), time.monotonic() + _SERVED_SECONDS
        while not self._pending and self.count_answers() == before and time.monotonic() < last:
            time.sleep(_POLL_SECONDS)

    def _undo_pending(self) -> None:
        while self._pending:
            self._pending.pop()()
