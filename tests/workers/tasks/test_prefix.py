"""What another session said first is not prefilled again where the words are the same."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.domain.page_ids import ID_BYTES
from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.model.tokenizer import Segment
from workers.tasks.prefix import skip_tokens

PAGE = 64
ATTEND_STORED = json.dumps({"prefill": {"attend": "stored"}})


def first_turn(
    worker: Any, name: str, texts: list[str], prefix: pb.Prefix | None = None
) -> pb.TurnDone:
    """A session's first turn: a system message and a question."""
    roles = ("system", "user")
    request = pb.TurnRequest(
        session=name,
        epoch=1,
        messages=[
            pb.Message(role=role, content=text) for role, text in zip(roles, texts, strict=True)
        ],
        generate=True,
        sampling=pb.Sampling(max_tokens=24),
        prefix=prefix,
    )
    return worker.scheduler.turn(request, lambda event: None).result(600)


def build_prefix(owner: str, first: pb.TurnDone, epoch: int = 1) -> pb.Prefix:
    """The pages that a session has after its first turn, committed under an epoch."""
    page_ids = first.state.page_ids
    committed = pb.CommitPoint(epoch=epoch, length=first.state.length)
    pages = len(page_ids) // ID_BYTES
    shared = pb.SharedPages(owner=owner, pages=pages, history=[committed])
    return pb.Prefix(page_ids=page_ids, shared=[shared])


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
    for name in ("first", "second", "alone"):
        worker.open(name, **spec)
    first = first_turn(worker, "first", [system, words(5, seed=1)])
    prefix = build_prefix("first", first)
    worker.engine.passes.clear()
    alone = first_turn(worker, "alone", [system, words(6, seed=2)])
    prefilled = sum(tokens for _, tokens in worker.engine.passes if tokens > 1)
    worker.engine.passes.clear()
    second = first_turn(worker, "second", [system, words(6, seed=2)], prefix)
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
    for name in ("first", "second", "alone"):
        worker.open(name, **spec)
    first = first_turn(worker, "first", [system, words(5, seed=1)])
    prefix = build_prefix("first", first)
    alone = first_turn(worker, "alone", [system, words(6, seed=2)])
    second = first_turn(worker, "second", [system, words(6, seed=2)], prefix)
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


def test_where_rows_are_selected_by_attention_no_prefix_over_the_budget_is_shared(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker("qwen2", block_tokens=32, recent=8)
    for name in ("first", "second"):
        worker.open(name, method="snapkv", budget=160, options=ATTEND_STORED)
    first = first_turn(worker, "first", [words(280), words(5, seed=1)])
    prefix = build_prefix("first", first)
    second = first_turn(worker, "second", [words(280), words(6, seed=2)], prefix)
    assert 0 < second.shared_pages * PAGE <= 160
    worker.check()


def test_pages_of_an_owner_that_were_written_before_it_committed_them_are_not_taken(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("owner", "second"):
        worker.open(name)
    first = first_turn(worker, "owner", [words(200), "Hello."])
    # The owner's turn here was given up; the same tokens were committed elsewhere, under epoch 2.
    prefix = build_prefix("owner", first, epoch=2)
    assert first_turn(worker, "second", [words(200), "Hello."], prefix).shared_pages == 0
    worker.open("third")
    prefix = build_prefix("owner", first)
    assert first_turn(worker, "third", [words(200), "Hello."], prefix).shared_pages > 0
    worker.check()


def test_only_a_common_prefix_is_taken(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("first", "second", "third"):
        worker.open(name)
    first = first_turn(worker, "first", [words(200), words(5)])
    prefix = build_prefix("first", first)
    assert first_turn(worker, "second", [words(200, seed=9), words(5)], prefix).shared_pages == 0
    half = words(100) + " " + words(100, seed=9)
    assert (
        0
        < first_turn(worker, "third", [half, words(5)], prefix).shared_pages
        < first.prompt_tokens // PAGE
    )
    worker.check()


def test_a_prefix_whose_pages_are_gone_is_prefilled(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    worker = make_worker()
    for name in ("first", "second", "third"):
        worker.open(name)
    texts = [words(200), words(5)]
    first = first_turn(worker, "first", texts)
    prefix = build_prefix("first", first)
    lose_page(worker.engine.store, "first", 1)
    second = first_turn(worker, "second", texts, prefix)
    assert second.shared_pages == 0
    assert list(second.token_ids) == list(first.token_ids)
    unknown = build_prefix("unknown", first)
    assert first_turn(worker, "third", texts, unknown).shared_pages == 0


def test_methods_that_accumulate_share_no_prefix(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    for name in ("first", "second"):
        worker.open(name, method="h2o", budget=512)
    texts = [words(200), words(5)]
    first = first_turn(worker, "first", texts)
    prefix = build_prefix("first", first)
    assert first_turn(worker, "second", texts, prefix).shared_pages == 0


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
        worker.open(name)
    texts = [words(200), words(5)]
    first = first_turn(worker, "first", texts)
    prefix = build_prefix("first", first)
    threads = []
    for call in ("open", "gather_selection"):
        original = getattr(worker.engine.store, call)

        def recorded(*args: Any, original: Any = original, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            return original(*args, **named)

        monkeypatch.setattr(worker.engine.store, call, recorded)
    assert first_turn(worker, "second", texts, prefix).shared_pages > 0
    lose_page(worker.engine.store, "first", 1)
    assert first_turn(worker, "third", texts, prefix).shared_pages == 0
    assert len(threads) >= 4
    assert "scheduler" not in threads
