"""Tenants get turns by tokens: nobody's flood keeps another's question waiting, or changes an answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.specs import METHODS
from workers.errors import Overloaded


class Hold:
    """An `emit` that holds the scheduler's thread at a turn's event number `at` until it is opened."""

    def __init__(self, at: int = 0) -> None:
        self._left = at
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, _: pb.TurnEvent) -> None:
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            assert self.go.wait(600)


def record_ends(turns: dict[str, "Future[pb.TurnDone]"]) -> list[str]:
    """A list of the turns' names, which grows in the order in which they end."""
    ended: list[str] = []
    for name, turn in turns.items():
        turn.add_done_callback(lambda _, name=name: ended.append(name))  # type: ignore[misc]
    return ended


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_a_preempted_turn_says_the_same(
    method: str, at: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Preempted before its prefill, after it, and while it decodes."""
    limits = {"block_tokens": 24, "recent": 8, "slots": 2}
    alone = make_worker(**limits)
    alone.open("s", **METHODS[method])
    expected = [alone.turn("s", words(90, seed=n), max_tokens=20) for n in range(2)]

    worker = make_worker(**limits)
    for name in ("s", "other"):
        worker.open(name, tenant="flood", **METHODS[method])
    worker.open("question", tenant="late")
    worker.turn("s", words(90, seed=0), max_tokens=20)
    hold = Hold(at)
    first = worker.submit("other", words(200), max_tokens=100)
    turn = worker.submit("s", words(90, seed=1), max_tokens=20, emit=hold)
    assert hold.reached.wait(600)
    question = worker.submit("question", words(5), max_tokens=2)
    ended = record_ends({"turn": turn, "other": first, "question": question})
    hold.go.set()
    done = turn.result(600)
    wait([first, question])
    assert worker.metric("kvrecall_worker_preemptions_total") >= 1
    assert list(done.token_ids) == list(expected[1].token_ids)
    assert ended[0] == "question"
    worker.check()


@pytest.mark.parametrize("flood", [4, 24])
def test_a_short_question_passes_a_flood_of_another_tenant(
    flood: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """However long the flood is, as few of its tokens are computed before the answer."""
    worker = make_worker(slots=2, block_tokens=32, max_jobs=64)
    for number in range(flood):
        worker.open(str(number), tenant="flood")
    worker.open("question", tenant="late")
    hold = Hold()
    turns = {"0": worker.submit("0", words(200), max_tokens=30, emit=hold)}
    assert hold.reached.wait(600)
    for number in range(1, flood):
        turns[str(number)] = worker.submit(str(number), words(200), max_tokens=30)
    passes = len(worker.engine.passes)
    turns["question"] = worker.submit("question", words(5), max_tokens=4)
    tokens = Future[int]()
    turns["question"].add_done_callback(
        lambda _: tokens.set_result(sum(n * t for n, t in worker.engine.passes[passes:]))
    )
    ended = record_ends(turns)
    hold.go.set()
    wait(turns.values(), timeout=600)
    assert ended[0] == "question"
    assert tokens.result() <= 400, "its own, and few of the flood's"
    worker.check()


def test_tenants_that_flood_at_once_end_together(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The second half of the first tenant's turns does not come before the other's first half."""
    worker = make_worker(slots=2, block_tokens=32)
    names = [f"{tenant}{number}" for tenant in "ab" for number in range(8)]
    for name in names:
        worker.open(name, tenant=name[0])
    hold = Hold()
    turns = {names[0]: worker.submit(names[0], words(60), max_tokens=10, emit=hold)}
    assert hold.reached.wait(600)
    turns |= {name: worker.submit(name, words(60), max_tokens=10) for name in names[1:]}
    ended = record_ends(turns)
    hold.go.set()
    wait(turns.values(), timeout=600)
    half = [name[0] for name in ended[:8]]
    assert 3 <= half.count("a") <= 5, ended


def test_a_weight_is_a_multiple_of_the_others_turns(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, block_tokens=32)
    names = [f"{tenant}{number}" for tenant in "ab" for number in range(12)]
    for name in names:
        worker.open(name, tenant=name[0], weight=3.0 if name[0] == "a" else 1.0)
    hold = Hold()
    turns = {"b0": worker.submit("b0", words(60), max_tokens=10, emit=hold)}
    assert hold.reached.wait(600)
    turns |= {name: worker.submit(name, words(60), max_tokens=10) for name in names if name != "b0"}
    ended = record_ends(turns)
    hold.go.set()
    wait(turns.values(), timeout=600)
    first = [name[0] for name in ended[:12]]
    assert 8 <= first.count("a") <= 10, ended


def test_background_turns_wait_for_all_others_and_give_up_their_slots(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, block_tokens=32)
    for name in ("later", "much later", "now"):
        worker.open(name)
    hold = Hold()
    turns = {"later": worker.submit("later", words(90), max_tokens=9, background=True, emit=hold)}
    assert hold.reached.wait(600)
    turns["much later"] = worker.submit("much later", words(9), background=True)
    turns["now"] = worker.submit("now", words(90), max_tokens=9)
    ended = record_ends(turns)
    hold.go.set()
    wait(turns.values(), timeout=600)
    assert ended[0] == "now"
    assert {done.result().output_tokens for done in turns.values()} == {9, 24}
    worker.check()


def test_a_preempted_turn_can_be_cancelled(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, block_tokens=16)
    worker.open("a", tenant="a")
    worker.open("b", tenant="b")
    hold = Hold(at=16)
    preempted = worker.submit("a", words(90), max_tokens=400, emit=hold)
    assert hold.reached.wait(600)
    asks = Hold(at=1)
    question = worker.submit("b", words(9), emit=asks)
    hold.go.set()
    assert asks.reached.wait(600)
    assert preempted.cancel()
    asks.go.set()
    question.result(600)
    assert worker.scheduler.slots_in_use() == 1
    assert worker.engine.sessions["a"].preempted is None
    assert not worker.scheduler.count_jobs()
    worker.open("a", tenant="a", epoch=2)
    assert worker.turn("a", words(9), epoch=2).output_tokens == 24
    worker.check()


def test_one_tenant_cannot_fill_the_worker(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, max_jobs=8)
    for number in range(8):
        worker.open(str(number), tenant="flood")
    worker.open("question", tenant="late")
    hold = Hold()
    turns = [worker.submit("0", words(9), emit=hold)]
    assert hold.reached.wait(600)
    turns += [worker.submit(str(number), words(9)) for number in range(1, 8)]
    question = worker.submit("question", words(9))
    hold.go.set()
    assert question.result(600).output_tokens
    refused = [isinstance(turn.exception(600), Overloaded) for turn in turns]
    assert refused == [False] * 6 + [True] * 2
