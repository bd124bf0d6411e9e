"""The steps of a re-selection: what it waits for, who runs between them, and what fails them."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.errors import TierFailedError
from tests.workers.drive import drive
from tests.workers.repair.reselections import SMALL, active, speak
from workers.errors import StorageFailed
from workers.repair.reselection import TurnReselections, reselect


def test_the_newest_rows_are_awaited_before_the_scan(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Their write is held up: without the wait the store would not have them."""
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**SMALL)
    worker.turn("s", words(120), generate=False)
    gate = threading.Event()
    worker.engine.store_io.submit(gate.wait)
    resident = speak(worker, 4)
    assert worker.engine.store.length("s") < resident.session.length
    running = reselect(worker.engine, resident, 4, TurnReselections())
    try:
        write = next(running)
        assert isinstance(write, Future)
        assert not write.done()
    finally:
        gate.set()
    write.result()
    drive(running)
    assert worker.engine.store.length("s") == resident.session.length
    worker.check()


def test_other_sessions_decode_between_its_steps(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """A step per chunk of pages, and one per layer for its scores and for its selection."""
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**SMALL)
    worker.turn("s", words(150), generate=False)
    resident = speak(worker, 4)
    running = reselect(worker.engine, resident, 4, TurnReselections())
    assert drive(running)[1] >= 1 + 2 + 2


def test_sessions_that_decode_together_say_what_each_says_alone(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32, recent=8)
    texts = [words(60 + 20 * number, seed=number) for number in range(3)]
    alone = []
    for number, text in enumerate(texts):
        worker.open(f"alone{number}", **SMALL)
        alone.append(worker.turn(f"alone{number}", text, max_tokens=20))
        worker.open(f"beside{number}", **SMALL)
    running = [
        worker.submit(f"beside{number}", text, max_tokens=20) for number, text in enumerate(texts)
    ]
    for expected, turn in zip(alone, running, strict=True):
        found = turn.result(600)
        assert list(found.token_ids) == list(expected.token_ids)
        assert found.state.selection == expected.state.selection
        assert found.reselections.count == expected.reselections.count > 0
    assert max(sessions for sessions, _ in worker.engine.passes) > 1
    worker.check()


def test_a_failed_read_moves_no_row(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**SMALL)
    worker.turn("s", words(120), generate=False)
    resident = speak(worker, 4)
    before = active(worker)

    def fail(*_: Any, **__: Any) -> None:
        raise TierFailedError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(worker.engine.store, "hold_pages", fail)
        with pytest.raises(StorageFailed):
            drive(reselect(worker.engine, resident, 4, TurnReselections()))
    assert active(worker) == before
    worker.check()


def test_the_neutral_signal_is_observed_once_and_again_after_128_tokens(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs a step of the model. The next answer observes its own."""
    worker = make_worker(block_tokens=32, recent=8)
    worker.open(**{**SMALL, "method_settings": '{"every": 8, "first": 0}'})
    worker.turn("s", words(150), generate=False)
    engine = worker.engine
    observe, lengths = engine.observe, list[int]()

    def count(resident: Any, token_ids: Any) -> Any:
        lengths.append(resident.session.length)
        return observe(resident, token_ids)

    monkeypatch.setattr(engine, "observe", count)
    for _ in range(2):
        lengths.clear()
        done = worker.turn("s", words(20), max_tokens=150)
        assert done.output_tokens == 150, "the words of this test are answered at length"
        first = lengths[0]
        assert lengths == [first, first + 136]
