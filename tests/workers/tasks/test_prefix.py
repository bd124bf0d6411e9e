"""What another session said first is not prefilled again where the words are the same."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.tasks.turn_log import logged, rebuild
from workers.model.tokenizer import Segment
from workers.tasks.prefix import skip_tokens

PAGE = 64
ATTEND_STORED = json.dumps({"prefill": {"attend": "stored"}})


KEY = {"row_key": b"one tenant"}


def first_turn(worker: Any, name: str, texts: list[str]) -> pb.TurnDone:
    """A session's first turn: a system message and a question."""
    roles = ("system", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    done: pb.TurnDone = worker.turn(name, messages)
    return done


def read_rows(worker: Any, name: str, length: int) -> torch.Tensor:
    """The session's stored rows."""
    rows: torch.Tensor = worker.engine.store.gather(name, torch.arange(length))
    return rows


SPECS = [
    {"method": "full", "budget": 1024},
    {"method": "snapkv", "budget": 1024},
    {"method": "snapkv", "budget": 160},
    {"method": "kvzip", "budget": 160},
]


@pytest.mark.parametrize("spec", SPECS, ids=["full", "roomy", "tight", "prompted"])
def test_a_shared_prefix_gives_the_same_answer_with_less_prefill(
    make_worker: Callable[..., Any], words: Callable[..., str], spec: dict[str, Any]
) -> None:
    worker = make_worker(block_tokens=128)
    system = words(200)
    for name in ("first", "second"):
        worker.open(name, **spec, **KEY)
    worker.open("alone", **spec)
    first_turn(worker, "first", [system, words(5, seed=1)])
    worker.engine.passes.clear()
    alone = first_turn(worker, "alone", [system, words(6, seed=2)])
    prefilled = sum(tokens for _, tokens in worker.engine.passes if tokens > 1)
    worker.engine.passes.clear()
    second = first_turn(worker, "second", [system, words(6, seed=2)])
    assert second.shared_pages >= 2
    assert (
        sum(tokens for _, tokens in worker.engine.passes if tokens > 1)
        == prefilled - PAGE * second.shared_pages
    )
    assert list(second.token_ids) == list(alone.token_ids)
    assert second.prefilled_tokens == second.prompt_tokens - PAGE * second.shared_pages
    before = worker.engine.prefilled_tokens
    later = worker.turn("second", "and then")
    assert list(later.token_ids) == list(worker.turn("alone", "and then").token_ids)
    pending = later.prefilled_tokens - later.prompt_tokens
    assert pending == len(second.state.pending) <= PAGE + 1
    assert worker.engine.prefilled_tokens - before == 2 * later.prefilled_tokens
    worker.check()


@pytest.mark.parametrize(
    "spec",
    [
        {"method": "icecache", "budget": 56},
        {"method": "icecache", "budget": 56, "method_settings": '{"sinks": 40}'},
        {"method": "icecache", "budget": 64, "layer_budgets": "pyramid"},
        {"method": "streaming_llm", "budget": 56, "options": ATTEND_STORED},
    ],
    ids=["icecache", "many_sinks", "pyramid", "streaming_llm"],
)
def test_where_blocks_attend_to_every_row_a_prefix_longer_than_the_budget_is_shared(
    make_worker: Callable[..., Any], words: Callable[..., str], spec: dict[str, Any]
) -> None:
    worker = make_worker("qwen2", block_tokens=32, recent=8)
    system = words(280)
    for name in ("first", "second"):
        worker.open(name, **spec, **KEY)
    worker.open("alone", **spec)
    first_turn(worker, "first", [system, words(5, seed=1)])
    alone = first_turn(worker, "alone", [system, words(6, seed=2)])
    second = first_turn(worker, "second", [system, words(6, seed=2)])
    assert second.shared_pages * PAGE >= 10 * spec["budget"]
    assert second.prefilled_tokens == second.prompt_tokens - PAGE * second.shared_pages < PAGE
    assert second.state.selection == alone.state.selection
    for turn in range(3):
        assert list(second.token_ids) == list(alone.token_ids)
        rows = [read_rows(worker, name, second.state.length) for name in ("second", "alone")]
        assert torch.equal(*rows)
        said = words(60, seed=9 + turn)
        second, alone = (worker.turn(name, said) for name in ("second", "alone"))
    worker.check()


RECALLING = {"method": "icecache", "budget": 72, "options": ATTEND_STORED}


@pytest.mark.parametrize(
    ("lost", "spec"),
    [
        ("taken", RECALLING),
        ("own", RECALLING),
        ("all", RECALLING),
        ("own", {"method": "full", "budget": 1024}),
    ],
    ids=["taken", "own", "all", "own-full"],
)
def test_a_prefix_ends_within_a_block_and_lost_pages_behind_it_are_computed_with_the_same_bits(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    lost: str,
    spec: dict[str, Any],
) -> None:
    worker = make_worker("qwen2", block_tokens=256, recent=8)
    for name in ("first", "s"):
        worker.open(name, **spec, **KEY)
    begins = words(100)
    first_turn(worker, "first", [f"{begins} {words(300, seed=3)}", words(5, seed=1)])
    worker.engine.passes.clear()
    texts = [f"{begins} {words(300, seed=4)}", words(5, seed=2)]
    done = first_turn(worker, "s", texts)
    taken, pages = done.shared_pages, done.state.length // PAGE
    assert taken % (256 // PAGE), "it ends within a block"
    assert taken >= 2
    assert worker.engine.passes[0] == (1, 256), "blocks begin behind it"
    rows = read_rows(worker, "s", done.state.length)
    for page in {"taken": range(taken), "own": range(taken, pages), "all": range(pages)}[lost]:
        lose_page(worker.engine.store, "s", page)
    turn = logged(done, texts[1])
    rebuild(worker, done.state, [turn], epoch=2, **spec, **KEY)
    again = read_rows(worker, "s", done.state.length)
    # The other session's blocks were cut elsewhere.
    allowed = 0 if lost == "own" else 1e-5
    torch.testing.assert_close(again, rows, atol=allowed, rtol=0)
    worker.check()


def test_where_rows_are_selected_by_attention_no_prefix_over_the_budget_is_shared(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", block_tokens=32, recent=8)
    for name in ("first", "second"):
        worker.open(name, method="snapkv", budget=160, options=ATTEND_STORED, **KEY)
    first_turn(worker, "first", [words(280), words(5, seed=1)])
    second = first_turn(worker, "second", [words(280), words(6, seed=2)])
    assert 0 < second.shared_pages * PAGE <= 160
    worker.check()


def test_other_tenants_find_nothing(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open("first", **KEY)
    worker.open("second", row_key=b"another tenant")
    texts = [words(200), words(5)]
    first_turn(worker, "first", texts)
    assert first_turn(worker, "second", texts).shared_pages == 0


def test_pages_of_a_turn_that_was_never_committed_are_found(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """They are right for their tokens, whatever became of the turn."""
    worker = make_worker()
    for name in ("first", "second"):
        worker.open(name, **KEY)
    texts = [words(200), words(5)]
    first = first_turn(worker, "first", texts)
    worker.open("first", epoch=2, **KEY)  # as before its turn
    again = first_turn(worker, "second", texts)
    assert again.shared_pages >= 2
    assert list(again.token_ids) == list(first.token_ids)
    worker.check()


def test_only_a_common_prefix_is_taken(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("first", "second", "third"):
        worker.open(name, **KEY)
    first = first_turn(worker, "first", [words(200), words(5)])
    assert first_turn(worker, "second", [words(200, seed=9), words(5)]).shared_pages == 0
    half = words(100) + " " + words(100, seed=9)
    assert (
        0 < first_turn(worker, "third", [half, words(5)]).shared_pages < first.prompt_tokens // PAGE
    )
    worker.check()


def test_a_prefix_is_taken_up_to_the_first_page_that_is_gone(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    worker = make_worker()
    for name in ("first", "second"):
        worker.open(name, **KEY)
    texts = [words(200), words(5)]
    first = first_turn(worker, "first", texts)
    lose_page(worker.engine.store, "first", 1)
    second = first_turn(worker, "second", texts)
    assert second.shared_pages == 1
    assert list(second.token_ids) == list(first.token_ids)


def test_methods_that_accumulate_share_no_prefix(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("first", "second"):
        worker.open(name, method="h2o", budget=512, **KEY)
    texts = [words(200), words(5)]
    first_turn(worker, "first", texts)
    assert first_turn(worker, "second", texts).shared_pages == 0


def test_segments_lose_their_first_tokens() -> None:
    segments = [Segment((1, 2, 3), False), Segment((4, 5), True), Segment((6,), False)]
    assert skip_tokens(segments, 0) == segments
    assert skip_tokens(segments, 3) == segments[1:]
    assert skip_tokens(segments, 4) == [Segment((5,), True), Segment((6,), False)]
    assert skip_tokens(segments, 6) == []


def test_the_store_is_never_called_on_the_schedulers_thread(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the prefix can be read or not: other sessions decode meanwhile."""
    worker = make_worker()
    for name in ("first", "second", "third"):
        worker.open(name, **KEY)
    texts = [words(200), words(5)]
    first_turn(worker, "first", texts)
    threads = []
    for call in ("open", "contains", "gather_selection"):
        original = getattr(worker.engine.store, call)

        def recorded(*args: Any, original: Any = original, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            return original(*args, **named)

        monkeypatch.setattr(worker.engine.store, call, recorded)
    assert first_turn(worker, "second", texts).shared_pages > 0
    lose_page(worker.engine.store, "first", 1)
    assert first_turn(worker, "third", texts).shared_pages == 1
    assert len(threads) >= 6
    assert "scheduler" not in threads
