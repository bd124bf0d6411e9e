"""The injector gives clients an answer between two faults."""

import time
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from faults.kinds import injector, schedule
from faults.kinds.base import Undo
from faults.kinds.injector import Injector

KIND = "kill -9, worker"


class Clients:
    """Counts of answers, of which there is one more each third time that they are asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def count(self) -> int:
        self.asked += 1
        return self.asked // 3


def inject(monkeypatch: pytest.MonkeyPatch, clients: Clients, undo: Undo | None) -> list[int]:
    """Inject four faults; returns the answers that there were before each."""
    before = []

    def happen(_setup: Any, _rng: Random) -> Undo | None:
        before.append(clients.asked // 3)
        return undo

    monkeypatch.setitem(schedule.KINDS, KIND, happen)
    monkeypatch.setattr(injector, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    setup: Any = None
    Injector(setup, {KIND: 1}, "1", clients.count).run(4)
    return before


def test_a_fault_waits_for_an_answer_behind_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = inject(monkeypatch, Clients(), None)
    assert len(before) == 4
    assert all(one < other for one, other in pairwise(before))


def test_no_answer_is_waited_for_while_a_fault_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unserved(Clients):
        def count(self) -> int:
            self.asked += 1
            return 0

    lasting = schedule.Fault(0.0, KIND, "1", 0.0, lasts=True)
    monkeypatch.setattr(injector, "schedule", lambda *_: iter([lasting] * 4))
    monkeypatch.setattr(injector, "_SERVED_SECONDS", 0.0)
    clients = Unserved()
    inject(monkeypatch, clients, lambda: None)
    assert clients.asked == 5, "twice before the first fault, once before each other"
