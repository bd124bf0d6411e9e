"""Many sessions on one thread: together as alone, in order, and each with its own errors."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.engine.engine import Engine, Parts
from workers.errors import BadSettings, Cancelled, Overloaded, StaleEpoch, UnknownSession
from workers.scheduler.scheduler import Scheduler

SMALL = {
    "full": {},
    "snapkv": {"method": "snapkv", "budget": 60, "repair_rows": 12},
    "streaming_llm": {"method": "streaming_llm", "budget": 45},
    "random": {"method": "random", "budget": 50, "repair_rows": 8, "seed": 5},
}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_four_sessions_together_generate_what_transformers_generates(
    family: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker(family, block_tokens=17)
    for name in "0123":
        worker.open(name)
    turns = [
        worker.submit(name, f"{name} {words(40 + 2 * int(name))}", max_tokens=40) for name in "0123"
    ]
    wait(turns, timeout=600)
    for turn in turns:
        done = turn.result()
        assert answer(done) == continuation(family, done.token_ids[: done.prompt_tokens], 40)
    assert (4, 1) in worker.engine.passes, "all four decoded in one forward pass"
    worker.check()


def _talk(
    worker: Any, names: list[str], words: Callable[..., str], together: bool
) -> dict[str, list[int]]:
    """Three turns in each session, each with a repair; what was said, per session."""
    said: dict[str, list[int]] = {name: [] for name in names}
    for name in names:
        worker.open(name, **SMALL[name])
    for number in range(3):
        submitted = {}
        for name in names:
            at = list(SMALL).index(name)
            text = words(70 + 9 * at, seed=10 * number + at)
            submitted[name] = worker.submit(name, text, max_tokens=20, repair=True)
            if not together:
                submitted[name].result(600)
        for name, turn in submitted.items():
            said[name] += turn.result(600).token_ids
    return said


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_sessions_tokens_do_not_depend_on_the_batch(
    family: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    limits = {"block_tokens": 24, "recent": 8}
    together = make_worker(family, **limits)
    shared = _talk(together, list(SMALL), words, together=True)
    assert any(sessions > 1 and tokens == 1 for sessions, tokens in together.engine.passes)
    together.check()
    for name in SMALL:
        assert _talk(make_worker(family, **limits), [name], words, together=False) == {
            name: shared[name]
        }


def test_sampling_is_the_same_alone_and_in_a_batch(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    how = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 11}
    alone = make_worker()
    alone.open("s")
    expected = answer(alone.turn("s", words(30), **how))
    worker = make_worker()
    for name in ("a", "s", "b"):
        worker.open(name)
    others = [
        worker.submit(name, words(35, seed=3), temperature=1.5, seed=number)
        for number, name in enumerate("ab")
    ]
    assert answer(worker.submit("s", words(30), **how).result(600)) == expected
    wait(others, timeout=600)
    assert (3, 1) in worker.engine.passes


def test_more_sessions_than_slots_generate_the_same_as_with_a_slot_each(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    said = {}
    for slots in (2, 5):
        worker = make_worker(slots=slots, block_tokens=24, recent=8)
        methods = ["snapkv", "full", "random", "streaming_llm", "snapkv"]
        for number, method in enumerate(methods):
            worker.open(str(number), **{**SMALL[method], "seed": number})
        turns = [
            worker.submit(
                str(number),
                words(40 + 5 * number, seed=10 * turn + number),
                max_tokens=8,
                repair=turn > 0,
            )
            for turn in range(3)
            for number in range(5)
        ]
        said[slots] = [list(turn.result(600).token_ids) for turn in turns]
        assert worker.scheduler.slots_in_use() == slots
        worker.check()
    assert said[2] == said[5]


@pytest.mark.parametrize("block_tokens", [1, 7, 32])
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_layer_ever_exceeds_the_budget_and_a_block(
    block_tokens: int,
    bounded_workers: Callable[[int], Any],
    words: Callable[..., str],
    data: st.DataObject,
) -> None:
    worker = bounded_workers(block_tokens)
    method = data.draw(st.sampled_from(["snapkv", "streaming_llm", "random"]))
    repair_rows = data.draw(st.integers(0, 40))
    budget = data.draw(st.integers(worker.engine.settings.min_budget + repair_rows, 120))
    worker.open("s", method=method, budget=budget, repair_rows=repair_rows, epoch=1)
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 40))
        seed = data.draw(st.integers(0, 9))
        generate = data.draw(st.booleans())
        if data.draw(st.booleans()):
            repaired = worker.repair("s", text=words(length, seed=seed)).memory
            assert max(repaired.active_rows) <= budget
        done = worker.turn(
            "s", words(length, seed=seed), generate=generate, repair=data.draw(st.booleans())
        )
        memory = done.memory
        assert all(peak <= budget + block_tokens for peak in memory.peak_rows)
        assert list(memory.bound_rows) == [budget + block_tokens] * len(memory.peak_rows)
        assert max(memory.active_rows) <= budget
        assert memory.promoted_rows == 0
        worker.check()


@pytest.fixture
def bounded_workers(make_worker: Callable[..., Any]) -> Callable[[int], Any]:
    made: dict[int, Any] = {}

    def worker(block_tokens: int) -> Any:
        if block_tokens not in made:
            made[block_tokens] = make_worker(block_tokens=block_tokens, recent=4, slots=1)
        return made[block_tokens]

    return worker


def test_jobs_of_one_session_run_in_order(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    in_a_row = make_worker()
    one_by_one = make_worker()
    in_a_row.open()
    one_by_one.open()
    turns = [in_a_row.submit("s", words(9, seed=number), max_tokens=6) for number in range(5)]
    said = [list(turn.result(600).token_ids) for turn in turns]
    assert said == [
        list(one_by_one.turn("s", words(9, seed=number), max_tokens=6).token_ids)
        for number in range(5)
    ]


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
    never = make_worker()
    never.open()
    never.turn("s", words(40), max_tokens=8)
    assert list(again.token_ids) == list(
        never.turn("s", words(30, seed=1), max_tokens=12).token_ids
    )
    worker.check()


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
    gate.go.set()
    with pytest.raises(Overloaded):
        refused.result(600)
    assert running.result(600).output_tokens
    assert queued.result(600).output_tokens
    assert worker.scheduler.queued() == 0


def test_an_error_in_one_turn_ends_that_turn_alone(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    def break_off(_: pb.TurnEvent) -> None:
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


def test_unknown_sessions_and_stale_epochs_are_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    with pytest.raises(UnknownSession):
        worker.turn("unknown", "hello")
    worker.open(epoch=3)
    with pytest.raises(StaleEpoch):
        worker.turn("s", "hello", epoch=2)
    with pytest.raises(StaleEpoch):
        worker.open(epoch=2)
    assert worker.turn("s", "hello", epoch=3).output_tokens


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
    assert sum(worker.engine.store.usage().values()) == 0
    worker.scheduler.delete(pb.DeleteRequest(session="s")).result(600)
    worker.check()


def test_sessions_stored_before_are_deleted_as_unknown_unless_opened_since(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(directory="rows")
    for name in ("kept", "lost", "opened"):
        worker.open(name)
        worker.turn(name, words(5))
    worker.close()
    worker = make_worker(directory="rows")
    worker.open("new")
    worker.turn("new", words(5))
    listed = worker.scheduler.list_sessions(pb.ListSessionsRequest(stored=True, limit=10))
    assert listed.result(600) == ["kept", "lost", "opened"]
    worker.open("opened")

    def delete(name: str) -> bool:
        request = pb.DeleteRequest(session=name)
        return bool(worker.scheduler.delete_unknown(request, 3600.0).result(600))

    assert [delete("lost"), delete("opened"), delete("new")] == [True, False, False]
    assert worker.engine.store.sessions() == ["kept", "new", "opened"]
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
