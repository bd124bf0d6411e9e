"""A repair promotes the rows that a signal attends to, leaves no trace of it, and may stop at any moment."""

import json
from collections.abc import Callable
from concurrent.futures import CancelledError
from threading import Event
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.drive import drive
from workers.cache.active_cache import EMPTY
from workers.cache.transfers import Transfers
from workers.engine.selection import Selection
from workers.generation.host_copy import PageTaker
from workers.primitives.scoring import attention
from workers.primitives.selection import bursts
from workers.repair.promotion import demote_promoted, missing_rows
from workers.repair.repair import run_repair


def test_restoring_everything_equals_the_full_cache(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """All rows are prefilled in one block, most are evicted, a repair with room for all brings them back."""
    worker = make_worker(block_tokens=512, recent=8)
    worker.open("full")
    worker.open("s", method="random", budget=600, repair_rows=560)
    messages = [
        {"role": "user", "content": words(150)},
        {"role": "assistant", "content": words(40, seed=1)},
    ]
    worker.turn("full", messages, generate=False)
    stored = worker.turn("s", messages, generate=False).state.length
    assert max(worker.memory("s").active_rows) <= 40
    repaired = worker.repair("s", text="anything")
    assert set(repaired.memory.active_rows) == {stored}
    assert repaired.memory.evicted_rows == 0
    rows = worker.engine.store.gather("s", torch.arange(stored))
    for layer in range(2):
        keys, values, positions = worker.engine.cache.get_rows(
            worker.engine.session("s").slot, layer
        )
        assert torch.equal(torch.stack([keys, values]), rows[layer])
        assert positions.tolist() == [list(range(stored))] * 2
    # In exactly one block, so that the turn ends before anything is evicted again.
    asked = [
        {"role": "user", "content": "which"},
        {"role": "assistant", "content": words(30, seed=2)},
    ]
    kept = {}
    for name in ("full", "s"):
        worker.turn(name, asked, generate=False, keep_distribution=True)
        kept[name] = worker.engine.session(name).distribution.log_probs
    assert torch.allclose(kept["s"], kept["full"], atol=1e-4)


def test_after_restoring_everything_the_answer_is_transformers_own(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker("qwen3", block_tokens=512, recent=8)
    worker.open(method="snapkv", budget=600, repair_rows=560)
    said = list(worker.turn("s", words(150), generate=False).token_ids)
    assert max(worker.memory().active_rows) <= 40
    stored = worker.memory().length
    done = worker.turn("s", words(10, seed=1), repair=True)
    assert len(done.repair.promoted) > stored - 3 * 40, "all but what every layer and head holds"
    assert answer(done) == continuation("qwen3", [*said, *done.token_ids[: done.prompt_tokens]], 24)
    assert max(done.memory.active_rows) <= 40, (
        "what was promoted must earn its place after the turn"
    )


def test_a_second_repair_replaces_the_first(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    other = make_worker(block_tokens=64, recent=8)
    for each in (worker, other):
        each.open(method="snapkv", budget=60, repair_rows=20)
        each.turn("s", words(200), max_tokens=4)
    base = worker.memory()
    first = worker.repair("s", text=words(6, seed=1))
    assert first.memory.promoted_rows == len(first.report.promoted) == 20
    second = worker.repair("s", messages=[{"role": "user", "content": words(9, seed=2)}])
    assert second.memory.promoted_rows == len(second.report.promoted) == 20
    assert all(
        now <= before + 20
        for now, before in zip(second.memory.active_rows, base.active_rows, strict=True)
    )
    session = worker.engine.resident("s")
    demote_promoted(worker.engine.cache, session)
    held = Selection.from_slot(worker.engine.cache, session.slot)
    assert (
        held.to_bytes()
        == Selection.from_slot(other.engine.cache, other.engine.session("s").slot).to_bytes()
    )
    assert second.report.scored_rows == second.report.candidates > 0
    assert not second.report.truncated
    worker.check()


def test_a_repair_leaves_no_row_of_its_signal(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    worker.open(method="snapkv", budget=60, repair_rows=20)
    worker.turn("s", words(200), max_tokens=4)
    length = worker.memory().length
    repaired = worker.repair("s", text=words(300, seed=1))
    assert repaired.report.signal_tokens > 64, "longer than a block: observed block by block"
    assert (
        repaired.memory.length == repaired.state.length == length == worker.engine.store.length("s")
    )
    _, _, held = worker.engine.cache.get_rows(worker.engine.session("s").slot, 0)
    assert int(held[held != EMPTY].max()) < length


def test_all_copies_of_a_worker_share_their_streams(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Transfers] = []
    create = Transfers.__init__

    def count(self: Transfers, device: torch.device) -> None:
        made.append(self)
        create(self, device)

    monkeypatch.setattr(Transfers, "__init__", count)
    worker = make_worker()
    worker.open("s", budget=64, repair_rows=16)
    worker.turn("s", [{"role": "user", "content": words(90)}], generate=False)
    for text in ("anything", "else"):
        worker.repair("s", text=text)
    assert made == [worker.engine.cache.transfers]


def test_without_a_reserve_a_repair_does_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name, spec in {"full": {}, "none": {"method": "snapkv", "budget": 60}}.items():
        worker.open(name, **spec)
        worker.turn(name, words(100), max_tokens=4)
        before = worker.memory(name)
        repaired = worker.repair(name, text="a signal")
        assert not repaired.report.promoted
        assert repaired.memory == before


# Which rows come back


def opened(
    worker: Any, words: Callable[..., str], *, options: str = "", **settings: Any
) -> pb.MemoryReport:
    """A session of 200 words in a budget of 60, with room for 20 in a repair of these settings."""
    worker.open(
        method="snapkv",
        budget=60,
        repair_rows=20,
        repair_settings=json.dumps(settings),
        options=options,
    )
    worker.turn("s", words(200), max_tokens=4)
    return worker.memory()


def expected_scores(worker: Any, signal: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The signal's attention over every row, written out, counted where a row is evicted.

    And what is evicted.
    """
    engine = worker.engine
    resident = engine.resident("s")
    session = resident.session
    observed = engine.observe(resident, [*session.unread, *signal])
    keys = engine.store.gather("s", torch.arange(session.length))[:, 0]
    missing = missing_rows(engine.cache, resident.slot, session.length)
    positions = torch.arange(session.length, dtype=torch.int32).repeat(keys.shape[1], 1)
    total = torch.zeros(session.length)
    for layer, queries in enumerate(observed.queries):
        weights = attention(queries, keys[layer], positions, observed.positions).amax(2).sum(1)
        total += (weights * missing[layer]).sum(0)
    return total / (len(observed.queries) * observed.queries[0].shape[0]), missing


def test_the_published_form_promotes_the_bursts_of_the_signals_attention(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Through a worker, against Algorithm 1 written out.

    Mean over layers and heads of the maximum over the signal.
    """
    worker = make_worker(block_tokens=64, recent=8)
    opened(worker, words, select="bursts", contrast=0, before=1, after=3)
    session = worker.engine.session("s")
    signal = worker.engine.tokenizer.encode(words(6, seed=1))
    scores, missing = expected_scores(worker, signal)
    tie_break = session.eviction_scores.to_dense(session.length)
    best = bursts(scores, missing.any(0).any(0), tie_break, 20, before=1, after=3)
    assert list(worker.repair("s", text=words(6, seed=1)).report.promoted) == best.tolist()


@pytest.mark.parametrize("select", ["spread", "bursts"])
def test_a_swap_keeps_the_budget_and_uses_all_of_it(
    select: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    before = opened(worker, words, swap=True, select=select)
    assert all(60 - before.unsettled <= rows <= 60 for rows in before.active_rows), (
        "nothing is kept free"
    )
    repaired = worker.repair("s", text=words(6, seed=1))
    assert repaired.memory.active_rows == before.active_rows
    assert 0 < len(repaired.report.promoted) <= 20
    assert repaired.report.demoted_rows > 0
    done = worker.turn("s", words(30, seed=4))
    assert all(now <= 60 for now in done.memory.active_rows)
    assert all(peak <= 60 + 64 for peak in done.memory.peak_rows)
    worker.check()


def test_a_repaired_session_resumed_elsewhere_has_the_same_rows(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """What a swap has moved is in the state that is committed, and nothing else."""
    worker = make_worker(block_tokens=64, recent=8)
    opened(worker, words, swap=True)
    state = worker.repair("s", text=words(6, seed=1)).state
    first = worker.turn("s", words(5, seed=2))
    settings = json.dumps({"swap": True})
    worker.engine.store.truncate("s", state.length)
    worker.open(method="snapkv", budget=60, repair_rows=20, repair_settings=settings, state=state)
    assert list(worker.turn("s", words(5, seed=2)).token_ids) == list(first.token_ids)


# Ending early


@pytest.mark.parametrize("looks", range(6))
def test_a_repair_that_stops_early_promotes_the_best_rows_so_far(
    looks: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    worker.open(method="snapkv", budget=60, repair_rows=20)
    worker.turn("s", words(700), max_tokens=4)
    before = worker.memory()
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
    now = worker.memory()
    assert now.promoted_rows == len(report.promoted)
    assert all(
        rows <= held + 20 for rows, held in zip(now.active_rows, before.active_rows, strict=True)
    )
    worker.check()


def test_a_truncated_repair_keeps_the_rows_of_an_earlier_one(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    opened(worker, words)
    worker.repair("s", text=words(6, seed=1))
    session = worker.engine.resident("s")
    held = Selection.from_slot(worker.engine.cache, session.slot).to_bytes()
    report, _ = drive(run_repair(worker.engine, session, [5, 6, 7], "tool_result", lambda: True))
    session.session.dirty = False
    assert report.truncated
    assert not report.scored_rows
    assert not report.promoted
    assert Selection.from_slot(worker.engine.cache, session.slot).to_bytes() == held


@pytest.mark.parametrize(("options", "truncated"), [(1e-9, True), (600, False), (None, False)])
def test_a_repair_ends_at_the_sessions_deadline(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    options: float | None,
    truncated: bool,
) -> None:
    worker = make_worker(block_tokens=64, recent=8)
    opened(worker, words, options=json.dumps({"repair_seconds": options}))
    report = worker.repair("s", text=words(6, seed=1)).report
    assert report.truncated == truncated
    assert (report.scored_rows < report.candidates) == truncated
    own = worker.turn("s", words(6, seed=2), max_tokens=4, repair=True).repair
    assert own.truncated == truncated


@pytest.mark.parametrize("room", [1024, 0])
def test_a_turn_cancelled_in_its_own_repair_has_no_effect(
    room: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its rows are copied to host memory, or while pages are read without room for a copy."""
    worker = make_worker(block_tokens=64, recent=8, ram_pages=room)
    spec = {"method": "snapkv", "budget": 60, "repair_rows": 20}
    worker.open(**spec)
    state = worker.turn("s", words(300), max_tokens=4).state
    undisturbed = worker.turn("s", words(9, seed=1), repair=True)
    worker.open(state=state, **spec)
    reads = list[None]()
    where, name = (worker.engine.store, "read_keys") if room == 0 else (PageTaker, "take")
    read = getattr(where, name)
    submitted = Event()

    def cancelled_at_the_first_read(*arguments: Any) -> Any:
        reads.append(None)
        assert submitted.wait(60)
        turn.cancel()
        return read(*arguments)

    monkeypatch.setattr(where, name, cancelled_at_the_first_read)
    turn = worker.submit("s", words(9, seed=1), repair=True)
    submitted.set()
    with pytest.raises(CancelledError):
        turn.result(60)
    for _ in range(2):
        worker.scheduler.stop_early("unknown").result(60)
    assert reads
    assert worker.scheduler.slots_in_use() == worker.scheduler.queued() == 0
    monkeypatch.undo()
    worker.open(state=state, **spec)
    assert list(worker.turn("s", words(9, seed=1), repair=True).token_ids) == list(
        undisturbed.token_ids
    )
    worker.check()
