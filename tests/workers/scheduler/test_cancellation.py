"""Cancelled turns free their slot and are undone; errors end their own turn alone."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

from kvrecall.domain.page_ids import join_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.conftest import build_spec
from workers.engine.engine import Engine, Parts
from workers.errors import BadSettings, Cancelled, Overloaded, StaleEpoch, UnknownSession
from workers.scheduler.scheduler import Scheduler


class Gate:
    """An `emit` that holds the scheduler's thread at a turn's first token until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()

    def __call__(self, _: pb.TurnEvent) -> None:
        self.reached.set()
        self.go.wait(600)


def test_a_cancelled_turn_frees_its_slot_and_is_undone_by_the_next_open(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Cancelled while it decodes."""
    worker = make_worker(slots=1)
    worker.open()
    committed = worker.turn("s", words(40), max_tokens=8).state
    gate = Gate()
    turn = worker.submit("s", words(30, seed=1), emit=gate, max_tokens=500)
    assert gate.reached.wait(600)
    assert turn.cancel()
    gate.go.set()
    with pytest.raises(UnknownSession, match="open it again"):
        worker.turn("s", "again")
    assert worker.scheduler.slots_in_use() == 0
    worker.open(state=committed)
    assert worker.memory().length == committed.length == worker.engine.store.length("s")
    again = worker.turn("s", words(30, seed=1), max_tokens=12)
    worker.check()
    never = make_worker()
    never.open()
    never.turn("s", words(40), max_tokens=8)
    assert list(again.token_ids) == list(
        never.turn("s", words(30, seed=1), max_tokens=12).token_ids
    )


def test_a_turn_can_be_cancelled_in_the_middle_of_its_prefill(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=2, block_tokens=1)
    worker.open()
    state = worker.turn("s", words(5), max_tokens=2).state
    worker.open("other")
    gate = Gate()
    other = worker.submit("other", words(3), emit=gate, max_tokens=4)
    assert gate.reached.wait(600)
    turn = worker.submit("s", words(300))
    gate.go.set()
    other.result(600)
    while worker.memory("s").length < state.length + 10:
        assert not turn.done(), "the prefill of 300 tokens one by one is still running"
    turn.cancel()
    with pytest.raises(CancelledError):
        turn.result(600)
    worker.open(state=state)
    assert worker.memory().length == state.length
    assert worker.scheduler.slots_in_use() == 1, "only the other session's"
    worker.turn("s", words(5), max_tokens=2)
    worker.check()


def test_a_queued_turn_can_be_cancelled(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1)
    worker.open("a")
    worker.open("b")
    gate = Gate()
    running = worker.submit("a", words(5), emit=gate)
    assert gate.reached.wait(600)
    queued = worker.submit("b", words(5))
    queued.cancel()
    gate.go.set()
    running.result(600)
    assert worker.memory("b").length == 0
    assert worker.turn("b", words(5)).output_tokens == 24, (
        "it was never begun, so it need not be opened again"
    )


def test_a_fork_that_is_cancelled_before_it_began_leaves_no_open_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1)
    worker.open()
    done = worker.turn("s", words(40), max_tokens=4)
    turn = pb.LoggedTurn(token_ids=done.token_ids, prompt_tokens=done.prompt_tokens)
    gate = Gate()
    running = worker.submit("s", words(5), emit=gate)
    assert gate.reached.wait(600)
    fork = worker.scheduler.fork(pb.ForkRequest(spec=build_spec("child"), turns=[turn]))
    assert fork.cancel()
    gate.go.set()
    running.result(600)
    with pytest.raises(UnknownSession):
        worker.turn("child", "it would begin without a row of its parent")


def test_a_caller_may_cancel_at_any_moment(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Also in the instant in which its turn ends or is refused: the scheduler lives on."""
    worker = make_worker(slots=2, max_jobs=3)
    for number in range(40):
        worker.open(str(number % 5))
        turns = [
            worker.submit(str(number % 5), words(2 + number % 7), max_tokens=1 + number % 3)
            for _ in range(6)
        ]
        for turn in turns[: number % 7]:
            turn.cancel()
        wait(turns, timeout=600)
    worker.open("s")
    assert worker.turn("s", "hello").output_tokens
    worker.check()


def test_over_capacity_is_refused(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, max_jobs=2)
    worker.open()
    gate = Gate()
    running = worker.submit("s", words(5), emit=gate)
    assert gate.reached.wait(600)
    queued = worker.submit("s", words(5))
    refused = worker.submit("s", words(5))
    swept = worker.scheduler.list_pages(pb.ListPagesRequest())
    gate.go.set()
    assert swept.result(600) == set(), "what is the worker's own is not refused"
    with pytest.raises(Overloaded):
        refused.result(600)
    assert running.result(600).output_tokens
    assert queued.result(600).output_tokens
    assert worker.scheduler.queued() == 0


def test_an_error_in_one_turn_ends_that_turn_alone(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    def break_off(event: pb.TurnEvent) -> None:
        if event.HasField("token"):
            raise RuntimeError("the reader is gone")

    alone = make_worker()
    alone.open("good")
    expected = answer(alone.turn("good", words(30)))
    worker = make_worker()
    worker.open("good")
    worker.open("bad")
    good = worker.submit("good", words(30))
    bad = worker.submit("bad", words(31), emit=break_off)
    with pytest.raises(RuntimeError, match="the reader is gone"):
        bad.result(600)
    assert answer(good.result(600)) == expected
    with pytest.raises(UnknownSession):
        worker.turn("bad", "again")
    worker.open("bad")
    assert worker.turn("bad", words(31)).output_tokens
    worker.check()


def test_a_refused_open_cancels_no_job(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(epoch=2)
    gate = Gate()
    running = worker.submit("s", words(5), emit=gate, epoch=2)
    assert gate.reached.wait(600)
    opens = [
        worker.scheduler.open(
            pb.OpenRequest(spec=pb.SessionSpec(session="s", epoch=1, budget=99, method="full"))
        ),
        worker.scheduler.open(
            pb.OpenRequest(spec=pb.SessionSpec(session="s", epoch=2, budget=9, method="random"))
        ),
    ]
    gate.go.set()
    with pytest.raises(StaleEpoch):
        opens[0].result(600)
    with pytest.raises(BadSettings):
        opens[1].result(600)
    assert running.result(600).output_tokens == 24


def test_deleting_a_session_ends_its_turn_and_frees_slot_and_rows(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    worker.turn("s", words(80))
    gate = Gate()
    running = worker.submit("s", words(5), emit=gate)
    assert gate.reached.wait(600)
    dropped = worker.scheduler.delete(pb.DeleteRequest(session="s"))
    gate.go.set()
    dropped.result(600)
    with pytest.raises(Cancelled):
        running.result(600)
    assert worker.scheduler.slots_in_use() == 0
    assert worker.engine.store.sessions() == []
    worker.scheduler.delete(pb.DeleteRequest(session="s")).result(600)
    pages = worker.scheduler.list_pages(pb.ListPagesRequest()).result(600)
    request = pb.DeletePagesRequest(page_ids=join_ids(list(pages)))
    assert worker.scheduler.delete_pages(request).result(600) == len(pages) > 0, "held by none"
    assert sum(worker.engine.store.usage().values()) == 0
    worker.check()


def test_closing_ends_the_threads_and_cancels_what_runs(
    loaded: Callable[..., Any],
    tokenizer: Any,
    open_store: Callable[..., Any],
    words: Callable[..., str],
) -> None:
    from workers.engine.settings import WorkerSettings

    store = open_store(loaded("llama"))
    before = threading.active_count()
    engine = Engine(Parts(loaded("llama"), tokenizer, store, WorkerSettings()))
    scheduler = Scheduler(engine)
    spec = pb.SessionSpec(session="s", epoch=1, budget=99, method="full")
    scheduler.open(pb.OpenRequest(spec=spec)).result(600)
    gate = Gate()
    request = pb.TurnRequest(
        session="s", epoch=1, generate=True, messages=[pb.Message(role="user", content=words(30))]
    )
    running = scheduler.turn(request, gate)
    queued = scheduler.turn(request, gate)
    assert gate.reached.wait(600)
    threading.Timer(0.05, gate.go.set).start()
    scheduler.close()
    for turn in (running, queued, scheduler.turn(request, gate), scheduler.memory("s")):
        with pytest.raises(Cancelled):
            turn.result(600)
    scheduler.close()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert threading.active_count() == before
