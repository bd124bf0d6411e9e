"""Turns that re-select, retrieve or read stored rows come out the same however often they are interrupted."""

import json
import random
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.states import comparable
from tests.workers.tasks.turn_log import logged, rebuild

PAGE = 64
WAIT = 600
SPECS: dict[str, dict[str, Any]] = {
    "re-selection": {
        "method": "loopserve",
        "method_settings": '{"every": 4, "first": 4, "window": 8}',
    },
    "retrieval": {
        "method": "snapkv",
        "method_settings": '{"window": 8, "pool": 1}',
        "options": json.dumps({"retrieve": {"share": 0.3, "prompt_tokens": 8}}),
    },
    "re-selection and a tree": {
        "method": "loopserve",
        "method_settings": '{"every": 4, "first": 4, "window": 8}',
        "options": json.dumps({"retrieve": {"share": 0.3, "index": "tree", "scan": 0.5}}),
    },
    "all": {
        "method": "icecache",
        "options": json.dumps(
            {
                "reselect": {"every": 8, "first": 4},
                "retrieve": {"share": 0.3, "index": "summaries", "nodes": 16},
                "prefill": {"attend": "stored"},
            }
        ),
    },
}
LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8}
TURN: dict[str, Any] = {"max_tokens": 18}


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Specification of a session whose answers move rows."""
    return {"budget": 56, "repair_rows": 12, **SPECS[request.param]}


def rows_found(done: pb.TurnDone) -> int:
    """Rows that the turn's answer brought back, for some tokens or for one."""
    return done.reselections.rows_in + done.retrieval.rows


def run_turns(
    worker: Any, spec: dict[str, Any], words: Callable[..., str], turns: int = 3
) -> list[tuple[pb.TurnDone, str]]:
    """Session `s` after some turns that evict rows and bring others back."""
    worker.open(**spec)
    texts = [words(70, seed=seed) for seed in range(turns)]
    said = [(worker.turn("s", text, **TURN), text) for text in texts]
    assert [bool(rows_found(done)) for done, _ in said].count(True) > 1
    return said


def test_a_turn_that_runs_again_after_a_loss_brings_the_same_rows_back(
    spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Cancelled in the middle of its answer, opened as committed, and run once more."""
    worker = make_worker(**LIMITS)
    said = run_turns(worker, spec, words)
    state = said[-1][0].state
    expected = worker.turn("s", "and then", **TURN)
    worker.open(epoch=2, state=state, **spec)
    running: list[Any] = []
    heard: list[pb.TurnEvent] = []

    def emit(event: pb.TurnEvent) -> None:
        heard.append(event)
        if len(heard) == 11:
            running[0].cancel()

    running.append(worker.submit("s", "and then", epoch=2, emit=emit, **TURN))
    with pytest.raises(CancelledError):
        running[0].result(WAIT)
    assert len(heard) >= 11
    worker.open(epoch=3, state=state, **spec)
    again = worker.turn("s", "and then", epoch=3, **TURN)
    assert list(again.token_ids) == list(expected.token_ids)
    assert comparable(again.state) == comparable(expected.state)
    assert rows_found(again) == rows_found(expected) > 0
    worker.check()


def test_a_session_continues_with_the_rows_that_its_answer_left(
    spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Reopened from its state it continues with them; without its options they are others."""
    worker = make_worker(**LIMITS)
    worker.open(**spec)
    done = worker.turn("s", words(120), **TURN)
    worker.open("plain", budget=56, repair_rows=12, method="snapkv")
    without = worker.turn("plain", words(120), **TURN)
    assert done.state.selection != without.state.selection
    following = worker.turn("s", "and then", **TURN)
    worker.open(epoch=2, state=done.state, **spec)
    again = worker.turn("s", "and then", epoch=2, **TURN)
    assert comparable(again.state) == comparable(following.state)


def test_a_fork_by_replay_is_the_session_as_it_was(
    spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    said = run_turns(worker, spec, words)
    log = [logged(*turn) for turn in said]
    for count, (done, _) in enumerate(said, 1):
        forked = worker.fork("s", f"child{count}", log[:count], **spec)
        assert forked.state == done.state
    worker.check()


def test_pages_that_were_lost_are_computed_again_over_the_same_rows(
    spec: dict[str, Any],
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
) -> None:
    """Scans of the replay read what it has computed itself, whole pages and a part of one."""
    worker = make_worker(**LIMITS)
    said = run_turns(worker, spec, words)
    state = said[-1][0].state
    log = [logged(*turn) for turn in said]
    store = worker.engine.store
    everything = torch.arange(state.length)
    before = store.gather("s", everything)
    pages = range(-(-state.length // PAGE))
    for epoch, lost in enumerate(([pages[-2]], [1, pages[-1]], pages), 2):
        worker.check()  # no page is on its way into memory any more
        for page in lost:
            lose_page(store, "s", page)
        assert rebuild(worker, state, log, epoch=epoch, **spec).pages == len(lost)
        torch.testing.assert_close(store.gather("s", everything), before, rtol=1e-4, atol=1e-4)
    worker.check()


@dataclass
class Twin:
    """A session that is disturbed between its turns, beside one that is not."""

    worker: Any
    spec: dict[str, Any]
    name: str
    state: pb.SessionState | None = None
    epoch: int = 1
    done: list[pb.TurnDone] = field(default_factory=list)

    def turn(self, text: str, *, repair: bool) -> None:
        self.done.append(self.worker.turn(self.name, text, epoch=self.epoch, repair=repair, **TURN))
        self.state = self.done[-1].state

    def repair(self, text: str) -> None:
        request = pb.RepairRequest(
            session=self.name, epoch=self.epoch, trigger="tool_result", text=text
        )
        self.state = self.worker.scheduler.repair(request).result(WAIT).state

    def reopen(self) -> None:
        self.epoch += 1
        self.worker.open(self.name, epoch=self.epoch, state=self.state, **self.spec)

    def move(self) -> None:
        """Continue in a fork at the committed state, under another name."""
        assert self.state is not None
        self.name, self.epoch = f"{self.name}x", 1
        self.worker.open(self.name, state=self.state, **self.spec)

    def swap_out(self) -> None:
        for other in ("a", "b"):
            name = f"{other}{len(self.done)}"
            self.worker.open(name, budget=60, method="snapkv")
            self.worker.turn(name, "hello", max_tokens=2)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_turns_repairs_and_interruptions_gives_the_same_answers(
    seed: int, spec: dict[str, Any], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    choices = random.Random(seed)
    worker = make_worker(slots=2, **LIMITS)
    calm, disturbed = Twin(worker, spec, "calm"), Twin(worker, spec, "s")
    for twin in (calm, disturbed):
        worker.open(twin.name, **spec)
    for number in range(8):
        text = words(choices.randint(5, 60), seed=100 * seed + number)
        if number and choices.random() < 0.4:
            for twin in (calm, disturbed):
                twin.repair(text[:40])
        repair = choices.random() < 0.4
        calm.turn(text, repair=repair)
        disturbed.turn(text, repair=repair)
        found, expected = disturbed.done[-1], calm.done[-1]
        assert list(found.token_ids) == list(expected.token_ids)
        assert comparable(found.state) == comparable(expected.state)
        assert rows_found(found) == rows_found(expected)
        pairs = zip(found.memory.peak_rows, found.memory.bound_rows, strict=True)
        assert all(peak <= bound for peak, bound in pairs)
        choices.choice([disturbed.reopen, disturbed.move, disturbed.swap_out])()
        worker.check()
    assert sum(rows_found(done) > 0 for done in calm.done) > 4


def test_evictions_observe_the_method_s_own_window_alone(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """A method that looks at fewer queries than a re-selection evicts as it does without one."""
    worker = make_worker(block_tokens=32, recent=8)
    for name, options in (("with", '{"reselect": {"every": 64, "first": 64}}'), ("without", "")):
        worker.open(name, method="tova", budget=48, options=options)
    states = [worker.turn(name, words(120), max_tokens=9).state for name in ("with", "without")]
    assert states[0].selection == states[1].selection
