"""After a stop string a session remembers what its client was sent, and nothing else."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from workers.tasks.logged_tokens import fold_turns

BUDGETS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"method": "snapkv", "budget": 60, "repair_rows": 12},
    "h2o": {"method": "h2o", "budget": 60},
    "kvzip": {"method": "kvzip", "budget": 60},
    "epicache": {"method": "epicache", "budget": 60, "layer_budgets": "uniform"},
}


def free_answer(worker: Any, prompt: str, **spec: Any) -> str:
    """The text of an answer without stop strings, in a session of its own."""
    worker.open("free", **spec)
    worker.turn("free", prompt, max_tokens=40)
    return str(worker.shown("free"))


def stops_of(text: str) -> list[str]:
    """Strings of 3, 12 and 25 characters that are found in the middle of the text, and whole."""
    return [next(_pieces(text, size)) for size in (3, 12, 25)]


def _pieces(text: str, size: int) -> Iterator[str]:
    for at in range(10, len(text) - size):
        piece = text[at : at + size]
        if "\ufffd" not in piece and text.find(piece) == at:
            yield piece


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_next_turn_continues_what_was_sent(
    which: int,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    continuation: Callable[..., list[int]],
    answer: Callable[..., list[int]],
) -> None:
    worker = make_worker("qwen3", block_tokens=64)
    stop = stops_of(free_answer(worker, words(40)))[which]
    worker.open("s")
    done = worker.turn("s", words(40), max_tokens=40, stop=[stop])
    tokenizer = worker.engine.tokenizer
    sent = worker.shown("s")
    kept = list(done.token_ids[done.prompt_tokens :])
    assert stop not in sent
    assert tokenizer.decode(kept) == sent + tokenizer.eos_texts[0]
    assert done.finish_reason == "stop"
    assert done.memory.length == done.state.length == worker.engine.store.length("s")
    assert done.memory.length + len(done.state.pending) == len(done.token_ids)
    following = worker.turn("s", words(8, seed=1), max_tokens=24)
    said = [*done.token_ids, *following.token_ids[: following.prompt_tokens]]
    assert answer(following) == continuation("qwen3", said, 24)
    worker.check()


@pytest.mark.parametrize("name", list(BUDGETS))
def test_no_row_of_what_follows_a_stop_string_is_left(
    name: str, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=24, recent=8)
    spec = BUDGETS[name]
    stop = stops_of(free_answer(worker, words(150), **spec))[2]
    worker.open("s", **spec)
    done = worker.turn("s", words(150), max_tokens=40, stop=[stop])
    length = done.memory.length
    assert stop not in worker.shown("s")
    assert worker.engine.store.length("s") == length
    slot = worker.engine.resident("s").slot
    for layer in range(2):
        rows = worker.engine.cache.read(slot, layer)
        held = rows.positions[rows.positions < torch.iinfo(torch.int32).max]
        assert int(held.max()) < length
    worker.check()
    undisturbed = worker.turn("s", words(9, seed=3))
    worker.engine.store.truncate("s", length)
    worker.open("s", state=done.state, **spec)
    again = worker.turn("s", words(9, seed=3))
    assert list(again.token_ids) == list(undisturbed.token_ids), "as after a crash"


def test_a_stop_string_at_the_very_beginning_leaves_an_empty_answer(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    text = free_answer(worker, words(30))
    worker.open("s")
    done = worker.turn("s", words(30), max_tokens=40, stop=[text[:3]])
    assert worker.shown("s") == done.message.content == ""
    assert list(done.token_ids[done.prompt_tokens :]) == [worker.engine.tokenizer.eos_token_ids[0]]
    assert done.memory.length + done.memory.unsettled == done.prompt_tokens
    assert worker.turn("s", words(5, seed=2)).output_tokens
    worker.check()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_log_says_which_tokens_have_rows(
    which: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """A replay of the logged turn restores the same rows and the same pending tokens."""
    worker = make_worker(block_tokens=64)
    stop = stops_of(free_answer(worker, words(40)))[which]
    worker.open("s")
    done = worker.turn("s", words(40), max_tokens=40, stop=[stop])
    logged = pb.LoggedTurn(
        token_ids=done.token_ids,
        prompt_tokens=done.prompt_tokens,
        output_tokens=done.output_tokens,
        unsettled_tokens=done.state.unsettled,
    )
    assert fold_turns([logged]).pending == list(done.state.pending)
    assert fold_turns([logged]).rows == done.memory.length
