"""Recorded text whose distribution is kept: appended as an answer is, first and when replayed."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrecall.protocol.v1 import worker_pb2 as pb
from kvstore.errors import MissingPageError
from tests.workers.tasks.turn_log import logged, rebuild

PAGE = 64
LIMITS: dict[str, Any] = {"block_tokens": 32, "recent": 8, "max_budget": 512}
SETTINGS: dict[str, Any] = {
    "reselect": {"every": 4, "first": 4},
    "retrieve": {"share": 0.3, "prompt_tokens": 8},
    "prefill": {"attend": "stored"},
}


def spec_with(name: str) -> dict[str, Any]:
    """A small session with one setting that changes what its steps attend to."""
    options = json.dumps({name: SETTINGS[name]})
    return {
        "method": "snapkv",
        "budget": 60,
        "method_settings": '{"window": 8}',
        "options": options,
    }


def stored_rows(worker: Any, name: str, length: int) -> Tensor:
    rows: Tensor = worker.engine.store.gather(name, torch.arange(length))
    return rows


def recorded_reply(question: str, reply: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def test_recorded_text_has_the_rows_of_an_answer(
    make_worker: Callable[..., Any], words: Callable[..., str], lose_page: Callable[..., None]
) -> None:
    """Replayed as if it had been generated, the text has the same rows, re-selections included."""
    worker = make_worker(**LIMITS)
    spec = spec_with("reselect")
    worker.open("s", **spec)
    log = [logged(worker.turn("s", words(90), generate=False), words(90))]
    reply = recorded_reply(question := words(9, seed=1), words(90, seed=2))
    done = worker.turn("s", reply, generate=False, keep_distribution=True)
    assert done.reselections.count == (done.recorded_tokens - 1) // 4 > 10
    answered = logged(done, question)
    answered.output_tokens = answered.recorded_tokens
    answered.prompt_tokens -= answered.recorded_tokens
    answered.recorded_tokens = 0
    answered.unsettled_tokens -= 1  # the last token of an answer has no row in any case
    length = done.state.length
    page = length // PAGE - 1
    assert page * PAGE > length - done.recorded_tokens, "the page has rows of the text alone"
    before = stored_rows(worker, "s", length)
    lose_page(worker.engine.store, "s", page)
    rebuild(worker, done.state, [*log, answered], epoch=2, **spec)
    assert torch.equal(stored_rows(worker, "s", length), before)
    worker.check()


def test_recorded_text_without_a_distribution_is_read_in_blocks(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(**LIMITS)
    worker.open("s", **spec_with("reselect"))
    worker.turn("s", words(120), generate=False)
    done = worker.turn("s", recorded_reply(words(9), words(20, seed=1)), generate=False)
    assert done.recorded_tokens == 0
    assert not done.HasField("reselections")


@pytest.mark.parametrize("setting", sorted(SETTINGS))
def test_pages_that_were_lost_are_computed_again(
    setting: str,
    make_worker: Callable[..., Any],
    words: Callable[..., str],
    lose_page: Callable[..., None],
) -> None:
    worker = make_worker(**LIMITS)
    spec = spec_with(setting)
    worker.open("s", **spec)
    log: list[pb.LoggedTurn] = []
    for seed in range(3):
        text = words(60, seed=seed)
        done = worker.turn("s", text, max_tokens=4)
        log.append(logged(done, text))
        reply = recorded_reply(text := words(9, seed=seed + 7), words(20, seed=seed + 9))
        done = worker.turn("s", reply, generate=False, keep_distribution=True)
        assert done.recorded_tokens > 20
        log.append(logged(done, text))
    length = done.state.length
    before = stored_rows(worker, "s", length)
    lose_page(worker.engine.store, "s", 2)
    with pytest.raises(MissingPageError):
        stored_rows(worker, "s", length)
    assert rebuild(worker, done.state, log, epoch=2, **spec).pages == 1
    assert torch.equal(stored_rows(worker, "s", length), before)
    worker.check()
