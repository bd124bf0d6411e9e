"""Repairs and re-selections read a copy of the rows in host memory, or pages without room for it."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.drive import drive
from workers.repair.repair import run_repair

LIMITS: dict[str, Any] = {"block_tokens": 64, "recent": 8}
SPEC: dict[str, Any] = {"method": "snapkv", "budget": 60, "repair_rows": 20}


def opened(worker: Any, words: Callable[..., str], **spec: Any) -> None:
    worker.open(**{**SPEC, **spec})
    worker.turn("s", words(300), max_tokens=4)


def repaired(worker: Any, words: Callable[..., str], seed: int = 1) -> pb.RepairReport:
    return worker.repair("s", text=words(6, seed=seed)).report


@pytest.mark.parametrize(
    "settings", ["{}", '{"select": "bursts", "contrast": 0}', '{"swap": true}']
)
def test_without_room_for_a_copy_it_promotes_the_same_rows(
    settings: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    found = []
    for room in (1 << 30, 0):
        worker = make_worker(held_bytes=room, **LIMITS)
        opened(worker, words, repair_settings=settings)
        report = repaired(worker, words)
        assert report.scored_rows == report.candidates
        assert len(report.promoted) >= 20
        assert report.bytes_read > 0
        assert (worker.engine.sessions["s"].host_copy is not None) == (room > 0)
        found.append(list(report.promoted))
        worker.check()
    assert found[0] == found[1]


def test_only_rows_that_are_new_since_the_last_repair_are_read(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """And those of the last page, which a store may have changed when it was full."""
    worker = make_worker(**LIMITS)
    opened(worker, words)
    layout = worker.engine.store.layout
    length = worker.memory().length
    assert repaired(worker, words).bytes_read == length * layout.token_bytes
    again = repaired(worker, words, seed=2)
    assert again.bytes_read == length % layout.page_tokens * layout.token_bytes
    assert len(again.promoted) == 20


def test_the_memory_is_taken_from_sessions_that_are_not_running(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    opened(worker, words)
    room = 3 * worker.memory().length * worker.engine.store.layout.token_bytes // 2
    worker = make_worker(held_bytes=room, **LIMITS)
    opened(worker, words)
    repaired(worker, words)
    assert worker.engine.sessions["s"].host_copy is not None
    worker.open("t", **SPEC)
    worker.turn("t", words(300), max_tokens=4)
    worker.repair("t", text="which")
    assert worker.engine.sessions["t"].host_copy is not None
    assert worker.engine.sessions["s"].host_copy is None


@pytest.mark.parametrize("looks", range(8))
def test_a_repair_that_stops_early_promotes_the_best_rows_so_far(
    looks: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """While rows are copied and scored, in the second pass, or not at all."""
    worker = make_worker(**LIMITS)
    worker.open(**SPEC)
    worker.turn("s", words(700), max_tokens=4)
    calls: list[None] = []

    def stop_requested() -> bool:
        calls.append(None)
        return len(calls) > looks

    session = worker.engine.resident("s")
    signal = worker.engine.tokenizer.encode(words(6, seed=1))
    report, _ = drive(run_repair(worker.engine, session, signal, "tool_result", stop_requested))
    session.session.dirty = False
    assert report.truncated or report.scored_rows == report.candidates
    assert len(report.promoted) == min(20, report.scored_rows)
    assert worker.memory().promoted_rows == len(report.promoted)
    # What was copied by then is no less right.
    whole = repaired(worker, words)
    assert whole.scored_rows == whole.candidates
    assert len(whole.promoted) == 20
    worker.check()


def test_a_repair_after_a_rollback_finds_no_row_of_the_tokens_taken_back(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """A stop string drops the tokens behind it; a session opened as committed has other rows."""
    worker = make_worker(**LIMITS)
    opened(worker, words)
    state = worker.repair("s", text="which").state
    first = worker.turn("s", words(40, seed=3), max_tokens=40, repair=True)
    stop = worker.shown()[20:26]
    worker.open(**SPEC, epoch=2, state=state)
    stopped = worker.turn("s", words(40, seed=3), epoch=2, max_tokens=40, repair=True, stop=[stop])
    assert stopped.memory.length < first.memory.length
    assert stopped.repair.promoted == first.repair.promoted
    assert worker.engine.sessions["s"].host_copy.rows.length <= stopped.memory.length
    following = worker.turn("s", "and then", epoch=2, max_tokens=8, repair=True)
    worker.open(**SPEC, epoch=3, state=stopped.state)
    again = worker.turn("s", "and then", epoch=3, max_tokens=8, repair=True)
    assert again.repair.promoted == following.repair.promoted
    assert again.state == following.state
    worker.check()


@pytest.mark.parametrize("token_share", [0, 0.5, 1])
def test_a_re_selection_without_room_for_a_copy_selects_the_same_rows(
    token_share: float, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    reselect = {"every": 4, "first": 4, "token_share": token_share}
    options = json.dumps({"reselect": reselect})
    states = []
    for room in (1 << 30, 0):
        worker = make_worker(held_bytes=room, **LIMITS)
        worker.open(**SPEC, options=options)
        done = worker.turn("s", words(200), max_tokens=14)
        assert done.reselections.count > 1
        assert done.reselections.rows_in > 0
        assert (worker.engine.sessions["s"].host_copy is not None) == (room > 0)
        states.append((list(done.token_ids), done.state.selection))
        worker.check()
    assert states[0] == states[1]


def test_a_session_that_retrieves_and_repairs_has_one_copy(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    options = json.dumps({"retrieve": {"share": 0.3}})
    opened(worker, words, options=options)
    copy = worker.engine.sessions["s"].host_copy
    read = repaired(worker, words).bytes_read
    page_bytes = worker.engine.store.layout.page_bytes
    assert read < page_bytes
    assert worker.engine.sessions["s"].host_copy is copy
    assert worker.turn("s", words(20, seed=5), max_tokens=6).retrieval.rows > 0
