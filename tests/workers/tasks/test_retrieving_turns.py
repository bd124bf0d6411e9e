"""Turns whose steps retrieve rows: as the full cache where they retrieve all, within their bounds."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.index.key_codes import code_bytes
from workers.errors import BadSettings
from workers.native.attention import NativeAttention

LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8, "max_budget": 512}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def retrieve(**settings: Any) -> str:
    """A session's options with these settings of retrieval."""
    return json.dumps({"retrieve": settings})


ALL = {
    "budget": 360,
    "layer_budgets": "pyramid",
    "method": "streaming_llm",
    "options": retrieve(share=0.9, prompt_tokens=256),
}
"""36 rows per head of a layer, on average, are active between turns, and 324 retrieved: all others of a
short session. Split evenly, such a budget keeps all rows active while they fit."""


@pytest.fixture(params=["torch", "native"], autouse=True)
def backend(
    request: pytest.FixtureRequest, native: NativeAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What computes the steps of every worker of a test."""
    opened = {"torch": None, "native": native}[request.param]
    monkeypatch.setattr(NativeAttention, "open", lambda _rotations, _group: opened)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_retrieve_every_row_are_those_of_the_full_cache(
    family: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[[pb.TurnDone], list[int]],
    continuation: Callable[..., list[int]],
) -> None:
    """Token by token, over several turns, with a tenth of the rows active between the steps."""
    worker = make_worker(family, **LIMITS)
    worker.open(**ALL)
    tokens: list[int] = []
    for seed in range(4):
        done = worker.turn("s", words(30, seed=seed), max_tokens=12)
        tokens += done.token_ids[: done.prompt_tokens]
        expected = continuation(family, tokens, 12)
        assert answer(done) == expected[: len(answer(done))]
        assert len(answer(done)) == len(expected)
        tokens += done.token_ids[done.prompt_tokens :]
        if done.memory.evicted_rows:
            assert done.retrieval.rows > 0
    assert sum(done.memory.active_rows) <= 36 * len(done.memory.active_rows)
    assert done.memory.length > 200
    worker.check()


def test_without_retrieval_such_a_session_says_something_else(
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    answer: Callable[[pb.TurnDone], list[int]],
    continuation: Callable[..., list[int]],
) -> None:
    """So the test above can fail."""
    worker = make_worker(**LIMITS)
    worker.open(budget=36, method="streaming_llm")
    tokens: list[int] = []
    alike = []
    for seed in range(4):
        done = worker.turn("s", words(30, seed=seed), max_tokens=12)
        tokens += done.token_ids[: done.prompt_tokens]
        alike.append(answer(done) == continuation("llama", tokens, 12)[: len(answer(done))])
        tokens += done.token_ids[done.prompt_tokens :]
        assert not done.HasField("retrieval")
    assert not all(alike)


def test_recorded_text_retrieves_as_an_answer_does(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Its distribution is that of the full cache where every row is retrieved."""
    worker = make_worker(**LIMITS)
    worker.open("full", budget=512)
    worker.open("s", **ALL)
    worker.open("few", budget=36, method="streaming_llm")
    said = [
        {"role": "user", "content": words(20, seed=9)},
        {"role": "assistant", "content": words(20, seed=10)},
    ]
    for name in ("full", "s", "few"):
        for seed in range(3):
            worker.turn(name, words(30, seed=seed), max_tokens=1)
    worker.turn("full", said, generate=False, keep_distribution=True)
    found = worker.turn("s", said, generate=False, compare_with="full").fidelity
    without = worker.turn("few", said, generate=False, compare_with="full").fidelity
    assert found.tokens == without.tokens > 20
    assert found.kl_mean < 1e-6
    assert without.kl_mean > 0.1


def test_retrieved_rows_count_towards_the_bound_and_the_peak(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", budget=64, method="snapkv", options=retrieve(share=0.5, prompt_tokens=8))
    worker.open("few", budget=32, method="snapkv")
    for name in ("s", "few"):
        done = worker.turn(name, words(120), max_tokens=60)
        peak, bound = max(done.memory.peak_rows), max(done.memory.bound_rows)
        assert done.output_tokens == 60
        assert peak <= bound
        assert max(done.memory.active_rows) <= 32
    assert worker.memory("s").bound_rows[0] == 64 + 32


def test_a_batch_of_sessions_with_and_without_retrieval_decodes_as_each_alone(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    specs: dict[str, dict[str, Any]] = {
        "a": {"budget": 64, "method": "snapkv", "options": retrieve(share=0.5)},
        "b": {"budget": 80, "method": "icecache"},
        "c": {"budget": 64, "method": "keydiff"},
        "d": {"method": "full", "budget": 512},
    }
    alone, together = make_worker(slots=1, **LIMITS), make_worker(slots=4, **LIMITS)
    expected = {}
    for worker in (alone, together):
        for name, spec in specs.items():
            worker.open(name, **spec)
            worker.turn(name, words(60, seed=ord(name)), generate=False)
    for name in specs:
        expected[name] = alone.turn(name, "and then", max_tokens=40)
    running = {name: together.submit(name, "and then", max_tokens=40) for name in specs}
    for name, future in running.items():
        done = future.result(600)
        assert list(done.token_ids) == list(expected[name].token_ids)
        assert done.retrieval.rows == expected[name].retrieval.rows
    assert (4, 1) in together.engine.passes
    assert {name for name in specs if expected[name].retrieval.rows} == {"a", "b"}


def test_the_last_tokens_of_a_prompt_retrieve_only_where_an_answer_follows(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", budget=64, method="snapkv", options=retrieve(share=0.5, prompt_tokens=8))
    worker.turn("s", words(90), generate=False)
    worker.engine.passes.clear()
    assert not worker.turn("s", words(20), generate=False).HasField("retrieval")
    assert (1, 1) not in worker.engine.passes
    worker.engine.passes.clear()
    done = worker.turn("s", words(20), max_tokens=1)
    assert done.retrieval.steps == 8
    assert worker.engine.passes[-8:] == [(1, 1)] * 8


def test_an_answer_goes_on_without_retrieval_where_running_turns_have_all_memory(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """No turn fails for it; the memory of sessions whose turns are over is taken from them."""
    worker = make_worker(ram_pages=0, **LIMITS)
    worker.open("s", budget=64, method="icecache")
    worker.open("few", budget=64, method="streaming_llm")
    refused = worker.turn("s", words(90), max_tokens=8).retrieval
    assert (refused.refused, refused.steps) == (True, 0)
    assert not worker.turn("few", words(90), max_tokens=8).HasField("retrieval")
    assert worker.metric("kvrecall_worker_retrieval_refused_total") == 1
    layout = worker.engine.store.layout
    page = layout.page_bytes + code_bytes(layout)
    if not worker.engine.native:  # Of what torch reads there is a joined copy beside the pages.
        page += layout.page_bytes + 4 * code_bytes(layout)
    room = 3 * -(-worker.memory("s").length // layout.page_tokens) * page // 2
    worker = make_worker(held_bytes=room, **LIMITS)
    for name in ("s", "t"):
        worker.open(name, budget=64, method="icecache")
        done = worker.turn(name, words(90), max_tokens=8)
        assert done.retrieval.steps
        assert not done.retrieval.refused
    held = [worker.engine.sessions[name].host_copy for name in ("s", "t")]
    assert [each is None for each in held] == [True, False]


def test_memory_is_freed_with_the_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", budget=64, method="icecache")
    worker.turn("s", words(90), max_tokens=8)
    session = worker.engine.sessions["s"]
    assert worker.memory("s").retrieval_bytes == session.host_copy.nbytes > 0
    worker.open("s", epoch=2, budget=64, method="icecache")
    assert session.host_copy is session.find_retriever() is None


def test_a_stop_string_takes_back_rows_that_could_be_retrieved(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """The tokens behind it are dropped; what follows finds no row of theirs."""
    worker = make_worker(**LIMITS)
    worker.open("s", budget=64, method="icecache")
    first = worker.turn("s", words(90), max_tokens=40)
    text = worker.shown("s")
    stop = text[len(text) // 2 :][:6]
    worker.open("t", budget=64, method="icecache")
    stopped = worker.turn("t", words(90), max_tokens=40, stop=[stop])
    assert stopped.memory.unsettled < first.memory.unsettled
    rows = worker.engine.sessions["t"].host_copy.rows
    assert rows.length <= stopped.memory.length
    again = worker.turn("t", "and then", max_tokens=12)
    worker.open("t", epoch=2, state=stopped.state, budget=64, method="icecache")
    assert worker.turn("t", "and then", epoch=2, max_tokens=12).state == again.state
    worker.check()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "full", "options": retrieve(share=0.5)}, "keeps every row"),
        ({"method": "snapkv", "options": retrieve(share=0.95)}, r"retrieve\.share"),
        ({"method": "snapkv", "options": retrieve(rows=5)}, r"retrieve\.rows"),
        ({"method": "icecache", "method_settings": '{"share": 0}'}, "share"),
    ],
)
def test_retrieval_that_cannot_be_is_refused(
    spec: dict[str, Any], message: str, make_worker: Callable[..., Any]
) -> None:
    with pytest.raises(BadSettings, match=message):
        make_worker(**LIMITS).open(budget=64, **spec)


@pytest.mark.parametrize(
    ("budget", "share", "active"), [(200, 0.5, 100), (60, 0.5, 30), (20, 0.9, 13), (13, 0.5, 13)]
)
def test_retrieved_rows_leave_room_for_the_rows_that_always_stay(
    budget: int,
    share: float,
    active: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
) -> None:
    """Four sinks, eight recent rows and one to choose; the rest of the share is retrieved."""
    worker = make_worker(**LIMITS)
    worker.open(budget=budget, method="snapkv", options=retrieve(share=share))
    assert worker.turn("s", words(120), generate=False).memory.length > budget
    config = worker.engine.sessions["s"].config
    assert set(config.layer_rows) == {active}
    assert config.retrieved == budget - active


def test_all_rows_are_active_while_they_fit_the_budget_beside_the_rows_for_repairs(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open(budget=200, repair_rows=40, method="icecache")
    fits = worker.turn("s", words(60), max_tokens=4)
    assert 100 < fits.memory.length <= 160
    assert fits.memory.evicted_rows == 0
    worker.turn("s", words(90), generate=False)
    over = worker.turn("s", words(10), max_tokens=4)
    assert over.memory.evicted_rows > 0
    assert over.retrieval.rows > 0
    worker.check()
