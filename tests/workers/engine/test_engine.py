"""An engine opens, swaps and restores sessions, which then generate as if never interrupted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvrecall.domain.episodes import ActiveEpisode, EpisodeSegment
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.errors import TierFailedError
from tests.workers.states import comparable
from workers.engine.selection import Selection
from workers.errors import BadSettings, RowsMissing, StorageFailed, UnknownMethod, UnknownSession

SMALL = {"method": "snapkv", "budget": 60, "repair_rows": 16}
LIMITS = {"block_tokens": 24, "recent": 8}
EPISODE = ActiveEpisode("e3", tuple(range(60, 100)), (EpisodeSegment(3, 9, 0.5),))


@pytest.mark.parametrize("block_tokens", [1, 17, 128, 512])
@pytest.mark.parametrize("family", ["reference", "llama", "qwen2", "qwen3", "mistral"])
def test_four_sessions_that_decode_in_one_batch_generate_what_transformers_generates(
    family: str,
    block_tokens: int,
    make_worker: Callable[..., Any],
    continuation: Callable[..., list[int]],
) -> None:
    """Of different lengths, over an end token and on: 24 tokens each."""
    worker = make_worker(family, block_tokens=block_tokens)
    engine = worker.engine
    generator = torch.Generator().manual_seed(8)
    prompts = [
        torch.randint(2, 1270, (tokens,), generator=generator) for tokens in (33, 70, 1, 140)
    ]
    sessions = []
    said = []
    for name, prompt in zip("abcd", prompts, strict=True):
        worker.open(name)
        sessions.append(engine.swap_in(engine.session(name)))
        for block in prompt.split(block_tokens):
            logits = engine.forward(sessions[-1:], block[None])
        said.append([int(logits[0, -1].argmax())])
    for _ in range(23):
        logits = engine.forward(sessions, torch.tensor([tokens[-1:] for tokens in said]))
        for tokens, best in zip(said, logits[:, -1].argmax(-1).tolist(), strict=True):
            tokens.append(best)
    for prompt, tokens in zip(prompts, said, strict=True):
        assert tokens == continuation(family, prompt.tolist(), 24, endless=True)
    worker.check()


def _conversation(
    worker: Any, words: Callable[..., str], stop_after: int | None = None
) -> list[list[int]]:
    """Four turns with a pause and its repair after the second, from the start or from where it was stopped."""
    said = []
    for number in range(4):
        if stop_after is not None and number <= stop_after:
            continue
        said.append(list(worker.turn("s", words(70, seed=number), max_tokens=10).token_ids))
        if number == 1:
            worker.repair("s", text=words(5, seed=9))
    return said


@pytest.mark.parametrize(
    ("method", "stop_after"),
    [("snapkv", 0), ("snapkv", 2)]
    + [
        (method, 1)
        for method in (
            "snapkv",
            "h2o",
            "scissorhands",
            "adakv",
            "chunkkv",
            "kvzip",
            "infinipot",
            "epicache",
        )
    ],
)
def test_a_session_continues_in_another_worker_as_if_never_interrupted(
    method: str, stop_after: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Stopped after a turn, and after a turn with rows that a repair promoted and heads of uneven length."""
    spec = {**SMALL, "method": method, "layer_budgets": "pyramid"}
    limits = {**LIMITS, "prompt_tokens": 30}
    whole = make_worker(**limits)
    whole.open(**spec)
    whole.engine.session("s").episode = EPISODE
    expected = _conversation(whole, words)
    first = make_worker(directory="shared", **limits)
    first.open(**spec)
    first.engine.session("s").episode = EPISODE
    state = None
    for number in range(stop_after + 1):
        done = first.turn("s", words(70, seed=number), max_tokens=10)
        assert list(done.token_ids) == expected[number]
        state = done.state
        if number == 1:
            repaired = first.repair("s", text=words(5, seed=9))
            assert repaired.memory.promoted_rows == 16
            state = repaired.state
    assert state is not None
    first.close()
    second = make_worker(directory="shared", **limits)
    report = second.open(state=pb.SessionState.FromString(state.SerializeToString()), **spec)
    assert report.length == state.length
    assert not report.in_slot
    assert _conversation(second, words, stop_after) == expected[stop_after + 1 :]
    assert second.engine.passes[0][1] <= 24, "the history was not prefilled again"
    assert _state(second) == _state(whole)
    second.check()


def _state(worker: Any) -> pb.SessionState:
    return comparable(worker.engine.snapshot(worker.engine.session("s")))


def test_the_episode_is_part_of_what_is_committed(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    spec = {"method": "epicache", "layer_budgets": "uniform", "budget": 60}
    worker.open(**spec)
    session = worker.engine.session("s")
    session.episode = EPISODE
    state = worker.turn("s", words(20), max_tokens=2).state
    worker.open(state=state, **spec)
    session = worker.engine.session("s")
    assert session.episode == EPISODE


def test_unlike_sessions_decode_together_as_each_would_alone(
    make_worker: Callable[..., Any], words: Callable[..., str], answer: Callable[..., list[int]]
) -> None:
    """Of different methods, budgets and splits over the layers.

    Active sets fill up in the middle of the answers.
    """
    specs: dict[str, dict[str, Any]] = {
        "adakv": {"budget": 50, "layer_budgets": "pyramid"},
        "h2o": {"budget": 60},
        "infinipot": {"budget": 50},
        "streaming_llm": {"budget": 70, "layer_budgets": "pyramid"},
    }
    alone = {}
    for name, spec in specs.items():
        worker = make_worker(**LIMITS)
        worker.open(name, method=name, **spec)
        alone[name] = answer(worker.turn(name, words(40), max_tokens=80))
    worker = make_worker(**LIMITS)
    turns = {}
    for name, spec in specs.items():
        worker.open(name, method=name, **spec)
    for name in specs:
        turns[name] = worker.submit(name, words(40), max_tokens=80)
    assert {name: answer(turn.result(600)) for name, turn in turns.items()} == alone
    assert max(batch for batch, _ in worker.engine.passes) == 4
    worker.check()


def test_swapping_out_and_in_restores_the_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(slots=1, **LIMITS)
    worker.open(**SMALL)
    worker.turn("s", words(90), max_tokens=4)
    repaired = worker.repair("s", text="signal")
    rows = [
        tensor.clone() for layer in range(2) for tensor in worker.engine.cache.get_rows(0, layer)
    ]
    worker.open("other")
    worker.turn("other", "hello", max_tokens=2)
    out = worker.memory("s")
    assert not out.in_slot
    assert out.active_rows == repaired.memory.active_rows
    assert out.peak_rows == repaired.memory.peak_rows
    session = worker.engine.session("s")
    worker.engine.swap_out(worker.engine.session("other"))
    worker.engine.swap_in(session)
    again = [
        tensor for layer in range(2) for tensor in worker.engine.cache.get_rows(session.slot, layer)
    ]
    assert all(torch.equal(a, b) for a, b in zip(rows, again, strict=True))
    assert worker.engine.snapshot(session) == repaired.state
    worker.check()


def test_opening_with_the_committed_state_undoes_a_turn(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open(**SMALL)
    state = worker.turn("s", words(70), max_tokens=10).state
    once = worker.turn("s", words(40, seed=1), max_tokens=10)
    worker.open(state=state, **SMALL)
    assert worker.engine.store.length("s") == state.length
    twice = worker.turn("s", words(40, seed=1), max_tokens=10)
    assert list(twice.token_ids) == list(once.token_ids)
    assert comparable(twice.state) == comparable(once.state)
    worker.check()


def test_an_empty_state_makes_a_new_session(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    first = worker.turn("s", words(30), max_tokens=4)
    worker.open()
    assert worker.memory().length == worker.engine.store.length("s") == 0
    assert list(worker.turn("s", words(30), max_tokens=4).token_ids) == list(first.token_ids)


def test_missing_committed_rows_are_detected(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open()
    state = worker.turn("s", words(30), max_tokens=4).state
    worker.scheduler.delete(pb.DeleteRequest(session="s")).result(600)
    pages = pb.DeletePagesRequest(page_ids=state.page_ids)
    assert worker.scheduler.delete_pages(pages).result(600) > 0
    with pytest.raises(RowsMissing, match="lost pages 0"):
        worker.open(state=state)
    with pytest.raises(UnknownSession):
        worker.turn("s", "hello")


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"method": "forget"}, UnknownMethod, "forget"),
        ({"method": "snapkv", "budget": 50, "repair_rows": 20}, BadSettings, "leaves 30 rows"),
        ({"method": "snapkv", "budget": 20, "repair_rows": 30}, BadSettings, "leaves -10 rows"),
        ({"method": "snapkv", "budget": 5000}, BadSettings, "max_budget 4096"),
        ({"method": "snapkv", "method_settings": '{"window": "x"}'}, BadSettings, "window"),
        ({"tools": ["{"]}, BadSettings, "not JSON"),
    ],
)
def test_impossible_settings_are_refused(
    spec: dict[str, Any], error: type[Exception], message: str, make_worker: Callable[..., Any]
) -> None:
    worker = make_worker()
    with pytest.raises(error, match=message):
        worker.open(**spec)
    with pytest.raises(UnknownSession):
        worker.memory()


def test_more_active_rows_than_the_worker_now_allows_are_refused(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=128)
    worker.open()
    state = worker.turn("s", words(100), max_tokens=4).state
    with pytest.raises(BadSettings, match="active rows"):
        worker.open(method="snapkv", budget=50, state=state)
    assert worker.memory().length == state.length, "the session is still what it was"


def test_the_memory_report_counts_rows_and_bytes(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open(**SMALL)
    done = worker.turn("s", words(120), max_tokens=4)
    memory = done.memory
    shape = worker.engine.model.shape
    assert memory.length == done.state.length == worker.engine.store.length("s")
    # But for those of the last tokens, which the next turn computes again.
    counts = Selection.from_slot(worker.engine.cache, worker.engine.session("s").slot).row_counts()
    assert 0 < memory.unsettled < 44
    assert all(44 - memory.unsettled <= rows < 44 for rows in memory.active_rows)
    assert memory.active_bytes == sum(counts) * shape.row_bytes(torch.float32)
    assert memory.active_bytes == worker.engine.cache.active_bytes(worker.engine.session("s").slot)
    held_everywhere = set(range(memory.length))
    for layer in range(shape.n_layers):
        for head in worker.engine.cache.get_rows(worker.engine.session("s").slot, layer)[2]:
            held_everywhere &= set(head.tolist())
    assert memory.evicted_rows == memory.length - len(held_everywhere)
    assert memory.tier_bytes["nvme"] >= memory.length * 2 * 2 * shape.row_bytes(torch.float32)
    assert memory.in_slot


def test_every_row_is_written_through_as_it_was_computed(
    make_worker: Callable[..., Any], words: Callable[..., str], plain: Callable[..., Any]
) -> None:
    """Under the full cache the stored rows are transformers' own keys and values."""
    worker = make_worker(block_tokens=17)
    worker.open()
    done = worker.turn("s", words(60), max_tokens=12)
    length = done.memory.length
    with torch.inference_mode():
        cached = plain("llama")(
            torch.tensor([list(done.token_ids[:length])]), use_cache=True
        ).past_key_values
    rows = worker.engine.store.gather("s", torch.arange(length))
    for layer in range(2):
        assert torch.allclose(rows[layer, 0], cached.layers[layer].keys[0], atol=1e-4)
        assert torch.allclose(rows[layer, 1], cached.layers[layer].values[0], atol=1e-4)


def test_a_store_that_fails_ends_the_turn_and_loses_nothing_that_was_committed(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write fails and later ones would succeed: none may take the lost rows' positions."""
    worker = make_worker(**LIMITS)
    worker.open(**SMALL)
    state = worker.turn("s", words(70), max_tokens=10).state
    append = worker.engine.store.append
    calls = []

    def failing(session: str, rows: torch.Tensor, pages: list[bytes], *, final: bool) -> int:
        calls.append(session)
        if len(calls) == 2:
            raise TierFailedError("the disk does not answer")
        return append(session, rows, pages, final=final)

    monkeypatch.setattr(worker.engine.store, "append", failing)
    with pytest.raises(StorageFailed):
        worker.turn("s", words(60, seed=1), max_tokens=10)
    assert len(calls) == 2, "no write followed the one that failed"
    assert worker.scheduler.slots_in_use() == 0
    worker.open(state=state, **SMALL)
    again = worker.turn("s", words(60, seed=1), max_tokens=10)
    other = make_worker(**LIMITS)
    other.open(**SMALL)
    other.turn("s", words(70), max_tokens=10)
    assert list(again.token_ids) == list(
        other.turn("s", words(60, seed=1), max_tokens=10).token_ids
    )


def test_rows_that_cannot_be_read_leave_the_slot_free(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_worker(**LIMITS)
    worker.open(**SMALL)
    done = worker.turn("s", words(70), max_tokens=10)
    worker.open(state=done.state, **SMALL)

    def failing(*_: object, **__: object) -> None:
        raise TierFailedError("the disk does not answer")

    with monkeypatch.context() as broken:
        broken.setattr(worker.engine.store, "gather_selection", failing)
        with pytest.raises(StorageFailed):
            worker.turn("s", "hello")
    assert worker.scheduler.slots_in_use() == 0
    assert worker.turn("s", "hello", max_tokens=2).output_tokens, "the disk answers again"
