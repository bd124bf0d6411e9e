"""Sessions whose prompts attend to every stored row: their rows are those of a full cache."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.store import RowStore
from tests.workers.tasks.turn_log import logged, rebuild
from workers.errors import BadSettings, RowsMissing

PAGE = 64
LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8}
STORED: dict[str, Any] = {"options": json.dumps({"prefill": {"attend": "stored"}})}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
FEW = {"method": "snapkv", "budget": 40, "method_settings": '{"window": 8}'}


def stored_rows(worker: Any, name: str, length: int) -> Tensor:
    rows: Tensor = worker.engine.store.gather(name, torch.arange(length))
    return rows


def append(worker: Any, name: str, texts: Sequence[str]) -> pb.TurnDone:
    """Append recorded messages, which no session decodes; the last turn."""
    for text in texts:
        done: pb.TurnDone = worker.turn(name, text, generate=False)
    return done


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_prompts_are_those_of_the_full_cache(
    family: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Over several turns and many evictions; so a budget alone has other rows."""
    worker = make_worker(family, **LIMITS)
    worker.open("full", budget=1024)
    worker.open("stored", **FEW, **STORED)
    worker.open("active", **FEW)
    texts = [words(70, seed=seed) for seed in range(4)]
    for name in ("full", "stored", "active"):
        done = append(worker, name, texts)
        assert max(done.memory.peak_rows) <= max(done.memory.bound_rows)
    length = done.memory.length
    assert length > 300
    full, stored, active = (stored_rows(worker, n, length) for n in ("full", "stored", "active"))
    torch.testing.assert_close(stored, full, rtol=1e-4, atol=1e-5)
    assert (active - full).abs().max() > 1e-2
    worker.check()


def test_an_answers_first_token_is_that_of_the_full_cache(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[[pb.TurnDone], list[int]],
    continuation: Callable[..., list[int]],
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("stored", **FEW, **STORED)
    tokens: list[int] = []
    for seed in range(4):
        done = worker.turn("stored", words(60, seed=seed), max_tokens=1)
        tokens += done.token_ids[: done.prompt_tokens]
        assert answer(done) == continuation("llama", tokens, 1)[: len(answer(done))]
        tokens += done.token_ids[done.prompt_tokens :]
    assert done.memory.evicted_rows


@pytest.mark.parametrize("method", ["h2o", "adakv", "epicache", "icecache", "streaming_llm"])
def test_pages_that_were_lost_are_computed_again(
    method: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
) -> None:
    worker = make_worker(**LIMITS)
    spec = {"method": method, "budget": 56, "layer_budgets": "uniform", **STORED}
    texts = [words(80, seed=seed) for seed in range(3)]
    for name in ("s", "twin"):
        worker.open(name, **spec)
    turns = [worker.turn("s", text, max_tokens=6) for text in texts]
    for text in texts:
        worker.turn("twin", text, max_tokens=6)
    length = turns[-1].state.length
    before = stored_rows(worker, "s", length)
    lose_page(worker.engine.store, "s", 2)
    for session in worker.engine.sessions.values():
        worker.engine.drop_host_copy(session)  # which has the page's rows, too
    with pytest.raises(RowsMissing):
        worker.turn("s", "and then", max_tokens=6)
    log = [logged(*turn) for turn in zip(turns, texts, strict=True)]
    assert rebuild(worker, turns[-1].state, log, epoch=2, **spec).pages == 1
    assert torch.equal(stored_rows(worker, "s", length), before)
    worker.open("s", epoch=2, state=turns[-1].state, **spec)
    ours = worker.turn("s", "and then", epoch=2, max_tokens=6)
    assert ours.token_ids == worker.turn("twin", "and then", max_tokens=6).token_ids
    worker.check()


def test_blocks_read_each_row_once_and_without_memory_for_that_the_same_rows_from_pages(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that were not full are taken again; nothing is rounded in a copy."""
    gather = RowStore.gather_heads
    reads: list[str] = []

    def counting(store: RowStore, session: str, *args: Any, **options: Any) -> Any:
        reads.append(session)
        return gather(store, session, *args, **options)

    monkeypatch.setattr(RowStore, "gather_heads", counting)
    texts = [words(70, seed=seed) for seed in range(4)]
    states = []
    for ram_pages in (1024, 0):
        worker = make_worker(ram_pages=ram_pages, **LIMITS)
        worker.open("s", **FEW, **STORED)
        done = append(worker, "s", texts)
        states.append(stored_rows(worker, "s", done.memory.length))
        if ram_pages:
            assert not reads
            taken = worker.engine.sessions["s"].host_copy.taken
            blocks = -(-done.memory.length // LIMITS["block_tokens"]) + len(texts)
            assert taken * PAGE < done.memory.length + PAGE * blocks
    assert reads
    assert torch.equal(*states)


def test_scratch_sessions_attend_to_the_rows_of_their_session(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a build with a prefill for each episode: they store no rows of their own."""
    worker = make_worker(**LIMITS)
    plan = pb.EpisodePlan(id="one", patched_prompt=range(20, 30), segments=[pb.Span(stop=64)])
    gather = RowStore.gather_heads
    reads: list[str] = []

    def counted(store: RowStore, session: str, *rest: Any) -> Any:
        reads.append(session)
        return gather(store, session, *rest)

    monkeypatch.setattr(RowStore, "gather_heads", counted)
    for name, options in (("stored", STORED), ("active", {})):
        worker.open(name, method="epicache", budget=56, layer_budgets="uniform", **options)
        turns = [worker.turn(name, words(70, seed=seed), generate=False) for seed in range(3)]
        token_ids = [token for done in turns for token in done.token_ids]
        token_ids = token_ids[: turns[-1].state.length]
        reads.clear()
        assert [each.id for each in worker.build(name, plan, token_ids=token_ids)] == ["one"]
        # Layer by layer, for every block but the first ones, which find all rows active.
        blocks = len(token_ids) // LIMITS["block_tokens"] - 2 if name == "stored" else 0
        assert len(reads) >= blocks * worker.engine.store.layout.n_layers
        assert set(reads) == ({name} if blocks else set())
    worker.check()


def test_nothing_is_read_while_every_row_is_active(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("stored", method="snapkv", budget=400, **STORED)
    with monkeypatch.context() as patch:
        patch.delattr("kvstore.store.RowStore.gather_heads")
        append(worker, "stored", [words(60, seed=seed) for seed in range(2)])
    worker.check()


def test_settings_that_act_nowhere_are_refused(make_worker: Callable[..., Any]) -> None:
    worker = make_worker()
    with pytest.raises(BadSettings, match=r"prefill\.attend.*full keeps every row"):
        worker.open(**STORED)
    both = {"options": json.dumps({"prefill": {"attend": "stored", "sparse": "on"}})}
    with pytest.raises(BadSettings, match="exclude each other"):
        worker.open(method="snapkv", **both)


def test_recorded_text_that_is_compared_is_read_as_it_would_be_decoded(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Over the active rows: its distribution says what an answer within the budget is like."""
    worker = make_worker(**LIMITS)
    worker.open("full", budget=1024)
    worker.open("stored", **FEW, **STORED)
    said = [
        {"role": "user", "content": words(20, seed=9)},
        {"role": "assistant", "content": words(20, seed=10)},
    ]
    for name in ("full", "stored"):
        append(worker, name, [words(70, seed=seed) for seed in range(3)])
    worker.turn("full", said, generate=False, keep_distribution=True)
    passes = len(worker.engine.passes)
    found = worker.turn("stored", said, generate=False, compare_with="full").fidelity
    assert worker.engine.passes[passes:].count((1, 1)) >= found.tokens > 20
    assert found.kl_mean > 1e-3
