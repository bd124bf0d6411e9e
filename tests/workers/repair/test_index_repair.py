"""Repairs and re-selections through the copy of a session's rows in host memory."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.drive import drive
from workers.repair.repair import run_repair

LIMITS: dict[str, Any] = {"block_tokens": 64, "recent": 8}
SPEC: dict[str, Any] = {"method": "snapkv", "budget": 60, "repair_rows": 20}


def opened(worker: Any, words: Callable[..., str], scan: str, **spec: Any) -> None:
    worker.open(**{**SPEC, "repair_scan": scan, **spec})
    worker.turn("s", words(300), max_tokens=4)


def repaired(worker: Any, words: Callable[..., str], seed: int = 1) -> pb.RepairReport:
    return worker.repair("s", text=words(6, seed=seed)).report


@pytest.mark.parametrize(
    "settings", ["{}", '{"select": "bursts", "contrast": 0}', '{"per_head": true}', '{"hops": 2}']
)
def test_it_promotes_what_an_exact_scan_promotes(
    settings: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    found = {}
    for scan in ("exact", "index"):
        worker = make_worker(**LIMITS)
        opened(worker, words, scan, repair_settings=settings)
        report = repaired(worker, words)
        assert report.scan == scan
        assert report.searched_share == 1
        assert report.scored_rows == report.candidates
        assert len(report.promoted) >= 20
        found[scan] = list(report.promoted)
        worker.check()
    assert found["index"] == found["exact"]


def test_only_rows_that_are_new_since_the_last_repair_are_read(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """And those of the last page, which a store may have changed when it was full."""
    worker = make_worker(**LIMITS)
    opened(worker, words, "index")
    layout = worker.engine.store.layout
    length = worker.memory().length
    assert repaired(worker, words).bytes_read == length * layout.token_bytes
    again = repaired(worker, words, seed=2)
    assert again.bytes_read == length % layout.page_tokens * layout.token_bytes
    assert len(again.promoted) == 20


@pytest.mark.parametrize("settings", ["{}", '{"per_head": true}'])
def test_without_memory_for_the_rows_it_scans_all_and_says_so(
    settings: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    reports = []
    for scan in ("exact", "index"):
        worker = make_worker(host_cache_bytes=0, **LIMITS)
        opened(worker, words, scan, repair_settings=settings)
        reports.append(repaired(worker, words))
        assert worker.engine.sessions["s"].indexed_rows is None
    assert [report.scan for report in reports] == ["exact", "exact"]
    assert reports[0].promoted == reports[1].promoted
    assert reports[0].bytes_read == reports[1].bytes_read > 0


def test_the_memory_is_taken_from_sessions_that_are_not_running(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    layout = make_worker(**LIMITS).engine.store.layout
    worker = make_worker(host_cache_bytes=2500 * layout.token_bytes, **LIMITS)
    opened(worker, words, "index")
    assert repaired(worker, words).scan == "index"
    worker.open("t", **{**SPEC, "repair_scan": "index"})
    worker.turn("t", words(300), max_tokens=4)
    assert worker.repair("t", text="which").report.scan == "index"
    assert worker.engine.sessions["s"].indexed_rows is None


@pytest.mark.parametrize("looks", range(8))
def test_a_repair_that_stops_early_promotes_the_best_rows_so_far(
    looks: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """While rows are copied, while layers are searched, while tokens are scored, or not at all."""
    worker = make_worker(**LIMITS)
    worker.open(**SPEC, repair_scan="index")
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
    opened(worker, words, "index")
    state = worker.repair("s", text="which").state
    first = worker.turn("s", words(40, seed=3), max_tokens=40, repair=True)
    stop = worker.shown()[20:26]
    worker.open(**{**SPEC, "repair_scan": "index"}, epoch=2, state=state)
    stopped = worker.turn("s", words(40, seed=3), epoch=2, max_tokens=40, repair=True, stop=[stop])
    assert stopped.memory.length < first.memory.length
    assert stopped.repair.scan == "index"
    assert stopped.repair.promoted == first.repair.promoted
    assert worker.engine.sessions["s"].indexed_rows.arena.length <= stopped.memory.length
    following = worker.turn("s", "and then", epoch=2, max_tokens=8, repair=True)
    worker.open(**{**SPEC, "repair_scan": "index"}, epoch=3, state=stopped.state)
    again = worker.turn("s", "and then", epoch=3, max_tokens=8, repair=True)
    assert again.repair.promoted == following.repair.promoted
    assert again.state == following.state
    worker.check()


@pytest.mark.parametrize("token_share", [0, 0.5, 1])
def test_a_re_selection_takes_its_candidates_from_the_index(
    token_share: float, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The rows of an exact scan, each with and without memory for the copy of the rows."""
    reselect = {"every": 4, "first": 4, "token_share": token_share}
    options = json.dumps({"reselect": reselect})
    states = []
    for scan, room in product(("exact", "index"), (1 << 30, 0)):
        worker = make_worker(host_cache_bytes=room, **LIMITS)
        worker.open(**SPEC, repair_scan=scan, options=options)
        done = worker.turn("s", words(200), max_tokens=14)
        assert done.reselections.count > 1
        assert done.reselections.rows_in > 0
        assert (worker.engine.sessions["s"].indexed_rows is not None) == (room > 0)
        states.append((list(done.token_ids), done.state.selection))
        worker.check()
    assert all(state == states[0] for state in states)


def test_a_session_that_retrieves_and_repairs_has_one_copy(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    options = json.dumps({"retrieve": '{"share": 0.3}'})
    opened(worker, words, "index", options=options)
    copy = worker.engine.sessions["s"].indexed_rows
    read = repaired(worker, words).bytes_read
    page_bytes = worker.engine.store.layout.page_bytes
    assert read < page_bytes
    assert worker.engine.sessions["s"].indexed_rows is copy
    assert worker.turn("s", words(20, seed=5), max_tokens=6).retrieval.rows > 0
