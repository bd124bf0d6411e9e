"""Turns that only append leave what they say unanswered to the signal of the next turn's repair."""

from collections.abc import Callable
from typing import Any

SMALL = {"method": "snapkv", "budget": 60, "repair_rows": 20}
APPENDING = {"generate": False, "defer_repair": True}


def test_the_next_repair_is_conditioned_on_all_that_was_appended_since(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """In another worker, too: what is deferred is part of the committed state."""
    first = make_worker(directory="shared", block_tokens=64)
    first.open(**SMALL)
    first.turn("s", words(200), max_tokens=4)
    appended = [first.turn("s", words(6, seed=seed), **APPENDING) for seed in (1, 2)]
    assert not any(done.HasField("repair") for done in appended)
    said = [token for done in appended for token in done.token_ids]
    assert list(appended[-1].state.deferred_signal) == said
    first.close()
    second = make_worker(directory="shared", block_tokens=64)
    second.open(state=appended[-1].state, **SMALL)
    asked = second.turn("s", words(5, seed=3), repair=True, max_tokens=4)
    assert asked.repair.signal_tokens == len(said) + asked.prompt_tokens
    assert asked.repair.promoted
    assert not asked.state.deferred_signal, "it has been answered"
    second.check()


def test_what_a_recorded_answer_follows_is_not_deferred(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(**SMALL)
    worker.turn("s", words(9), **APPENDING)
    answered = [
        {"role": "user", "content": words(8, seed=1)},
        {"role": "assistant", "content": words(7, seed=2)},
    ]
    done = worker.turn("s", answered, **APPENDING)
    assert not done.state.deferred_signal
    again = [*answered, {"role": "user", "content": words(6, seed=3)}]
    done = worker.turn("s", again, **APPENDING)
    deferred = worker.engine.tokenizer.decode(list(done.state.deferred_signal))
    assert words(6, seed=3) in deferred
    assert words(8, seed=1) not in deferred


def test_an_unrepaired_answer_settles_what_was_deferred(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker()
    worker.open(**SMALL)
    assert worker.turn("s", words(9), **APPENDING).state.deferred_signal
    assert not worker.turn("s", "hello", max_tokens=2).state.deferred_signal


def test_of_a_long_text_its_last_block_is_deferred(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=32)
    worker.open(**SMALL)
    done = worker.turn("s", words(150), **APPENDING)
    assert list(done.state.deferred_signal) == list(done.token_ids)[-32:]
