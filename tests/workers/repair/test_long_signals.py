"""A signal of any length counts whole, up to the worker's limit, and the report says how much."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.drive import drive
from workers.primitives.observation import Observed
from workers.primitives.scoring import attention
from workers.primitives.selection import bursts
from workers.repair.observe import observe_signal, split_evenly
from workers.repair.promotion import missing_rows
from workers.repair.repair import run_repair
from workers.repair.scan import softmax
from workers.repair.scan.softmax import Signal

BLOCK = 64
# Pages in memory: for a copy of the rows, and for none.
ROOM = (1024, 0)
SPEC: dict[str, Any] = {"method": "snapkv", "budget": 60, "repair_rows": 20}


def opened(worker: Any, words: Callable[..., str], **spec: Any) -> Any:
    """A session of 200 words in a budget of 60, with room for 20 in a repair."""
    worker.open(**{**SPEC, **spec})
    worker.turn("s", words(200), max_tokens=4)
    return worker.engine.resident("s")


def block_by_block(worker: Any, resident: Any, token_ids: Sequence[int]) -> Observed:
    """Each block observed on its own, joined."""
    return Observed.concatenate(
        [worker.engine.observe(resident, block) for block in split_evenly(token_ids, BLOCK)]
    )


@given(st.integers(1, 500), st.integers(1, 70))
def test_blocks_are_whole_few_and_even(length: int, most: int) -> None:
    blocks = split_evenly(range(length), most)
    assert [token for block in blocks for token in block] == list(range(length))
    assert len(blocks) == -(-length // most)
    assert max(map(len, blocks)) <= most
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@pytest.mark.parametrize("room", ROOM)
def test_every_token_of_a_long_signal_counts(
    room: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Against the published operator written out, over every block's queries."""
    worker = make_worker(block_tokens=BLOCK, recent=8, ram_pages=room)
    how = json.dumps({"select": "bursts", "contrast": 0, "before": 1, "after": 3})
    resident = opened(worker, words, repair_settings=how)
    engine = worker.engine
    session = resident.session
    signal = engine.tokenizer.encode(words(150, seed=5))
    assert len(signal) > 4 * BLOCK
    observed = block_by_block(worker, resident, [*session.unread, *signal])
    keys = engine.store.gather("s", torch.arange(session.length))[:, 0]
    missing = missing_rows(engine.cache, resident.slot, session.length)
    positions = torch.arange(session.length, dtype=torch.int32).repeat(keys.shape[1], 1)
    scores = torch.zeros(session.length)
    for layer, queries in enumerate(observed.queries):
        weights = attention(queries, keys[layer], positions, observed.positions).amax(2).sum(1)
        scores += (weights * missing[layer]).sum(0)
    scores[: engine.settings.sinks] = 0
    tie_break = session.eviction_scores.to_dense(session.length)
    best = bursts(scores, missing.any(0).any(0), tie_break, 20, before=1, after=3)
    report = worker.repair("s", text=words(150, seed=5)).report
    assert list(report.promoted) == best.tolist()
    assert report.observed_tokens == report.signal_tokens == len(signal)
    worker.check()


def test_several_results_all_count(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The first result decides what the last alone would not."""
    found = {}
    for first in (1, 2):
        worker = make_worker(block_tokens=BLOCK, recent=8)
        opened(worker, words)
        results = [
            {"role": "tool", "content": words(70, seed=seed), "tool_call_id": f"c{seed}"}
            for seed in (first, 9)
        ]
        report = worker.repair("s", messages=results).report
        assert report.observed_tokens == report.signal_tokens > 2 * BLOCK
        found[first] = list(report.promoted)
    assert found[1] != found[2]


def test_a_signal_over_the_limit_counts_with_its_last_tokens(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    found = []
    for seed in (1, 2):
        worker = make_worker(block_tokens=BLOCK, recent=8, signal_tokens=100)
        opened(worker, words)
        text = f"{words(90, seed=seed)} {words(90, seed=7)}"
        report = worker.repair("s", text=text).report
        assert report.observed_tokens == 100 < report.signal_tokens
        assert not report.truncated, "it did all that it may"
        found.append(list(report.promoted))
    assert found[0] == found[1]


def test_a_signal_that_fits_a_block_is_observed_at_once(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=BLOCK, recent=8)
    resident = opened(worker, words)
    signal = list(range(5, 5 + BLOCK - len(resident.session.unread)))
    passes = len(worker.engine.passes)
    observed, yielded = drive(observe_signal(worker.engine, resident, signal))
    assert yielded == 1
    assert observed.tokens == BLOCK
    assert len(worker.engine.passes) == passes, "it leaves no row"


def test_others_run_between_the_blocks(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=BLOCK, recent=8)
    resident = opened(worker, words)
    signal = worker.engine.tokenizer.encode(words(150, seed=5))
    before = worker.memory()
    observed, yielded = drive(observe_signal(worker.engine, resident, signal))
    assert observed.tokens == len(signal) + len(resident.session.unread)
    assert yielded == -(-observed.tokens // BLOCK)
    assert worker.memory() == before
    worker.check()


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_a_stop_ends_the_observation_after_the_newest_blocks(
    looks: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=BLOCK, recent=8)
    resident = opened(worker, words)
    signal = worker.engine.tokenizer.encode(words(150, seed=5))
    calls: list[None] = []

    def stop_requested() -> bool:
        calls.append(None)
        return len(calls) > looks

    report, _ = drive(run_repair(worker.engine, resident, signal, "tool_result", stop_requested))
    resident.session.dirty = False
    assert report.truncated
    assert 0 < report.observed_tokens <= looks * BLOCK < report.signal_tokens
    worker.check()


def test_half_of_a_deadline_is_left_for_the_scan(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that moves only while a block is observed: 1 second each, of 6 in all."""
    now = [0.0]
    monkeypatch.setattr("workers.repair.repair.time.perf_counter", lambda: now[0])
    worker = make_worker(block_tokens=BLOCK, recent=8)
    resident = opened(worker, words, options=json.dumps({"repair_seconds": 6.0}))
    observe = worker.engine.observe

    def take_a_second(*arguments: Any) -> Observed:
        now[0] += 1
        observed: Observed = observe(*arguments)
        return observed

    monkeypatch.setattr(worker.engine, "observe", take_a_second)
    signal = worker.engine.tokenizer.encode(words(250, seed=5))
    report, _ = drive(run_repair(worker.engine, resident, signal, "tool_result"))
    resident.session.dirty = False
    assert now == [3.0]
    assert report.truncated
    assert report.scored_rows == report.candidates, "the scan had the rest of the time"
    assert len(report.promoted) == 20


@pytest.mark.parametrize("room", ROOM)
def test_memory_is_bounded_by_comparing_a_long_signal_with_fewer_rows(
    room: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for limit in (softmax._MAX_LOGITS, 1 << 14):
        monkeypatch.setattr(softmax, "_MAX_LOGITS", limit)
        worker = make_worker(block_tokens=BLOCK, recent=8, ram_pages=room)
        opened(worker, words)
        found.append(list(worker.repair("s", text=words(150, seed=5)).report.promoted))
    assert found[0] == found[1]


@pytest.mark.parametrize(("tokens", "rows"), [(128, 1024), (8192, 146)])
def test_the_rows_compared_at_once_follow_from_the_signals_length(tokens: int, rows: int) -> None:
    """Of a model with 28 query heads: logits of 128 MiB at most."""
    queries = torch.zeros(1, 1, 8).expand(28, tokens, 8)
    signal = Signal(Observed((queries,), torch.arange(tokens)), 4, torch.device("cpu"))
    assert signal.rows_at_once(1024) == rows
    assert signal.rows_at_once(1024) * tokens * 28 * 4 <= 128 << 20
