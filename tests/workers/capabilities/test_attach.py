"""A capability is one class and its line in the list: the worker calls it wherever it may act."""

from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers import capabilities
from workers.cache.forward_step import ForwardStep
from workers.capabilities.capability import NextStep, StepCapability
from workers.generation.steps import Steps
from workers.parallel.group import Group


class Diary(StepCapability):
    """Writes down what it is asked, and reports the number of steps."""

    written: list[str]

    def __init__(self) -> None:
        self.written = []
        self._steps = 0

    def before_step(self, step: NextStep) -> Steps[None]:
        self.written.append(f"step {step.output_tokens}")
        self._steps += 1
        yield None  # another session may run meanwhile

    def clear_turn(self) -> None:
        self._steps = 0

    def drop_host_copy(self) -> None:
        self.written.append("copy dropped")

    def end_pass(self, step: ForwardStep) -> None:
        self.written.append(f"pass of {step.query_positions.shape[1]}")

    def report(self, done: pb.TurnDone, group: Group) -> None:
        done.seconds["diary"] = self._steps


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "CAPABILITIES", (*capabilities.CAPABILITIES, Diary))


def diary(worker: Any) -> Diary:
    (found,) = [each for each in worker.engine.session("s").capabilities if isinstance(each, Diary)]
    return found


def test_it_prepares_every_step_and_takes_every_pass(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open("s", budget=64, method="snapkv")
    done = worker.turn("s", words(20), max_tokens=3)
    tokens = done.prefilled_tokens
    assert diary(worker).written == [
        f"pass of {tokens}",
        "step 0",
        "pass of 1",
        "step 1",
        "pass of 1",
    ]


def test_it_reports_a_turn_and_forgets_it(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open("s", budget=64, method="snapkv")
    reported = [worker.turn("s", words(20), max_tokens=most).seconds["diary"] for most in (4, 2)]
    assert reported == [3, 1]


def test_it_learns_that_the_host_copy_is_freed(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open("s", budget=64, method="icecache")
    worker.turn("s", words(90), max_tokens=8)
    written = diary(worker).written
    assert "copy dropped" not in written
    worker.engine.drop_host_copy(worker.engine.session("s"))
    assert written[-1] == "copy dropped"


def test_every_session_has_its_own(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("s", "t"):
        worker.open(name, budget=64, method="snapkv")
        worker.turn(name, words(20), max_tokens=2)
    mine, other = (worker.engine.session(name).capabilities for name in ("s", "t"))
    assert not set(map(id, mine)) & set(map(id, other))
