"""Where the user's message follows a tool's result in a turn, it asks, and the result is context."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.workers.drive import drive
from workers.repair.observe import observe_signal

BLOCK = 64
SMALL: dict[str, Any] = {"method": "snapkv", "budget": 60, "repair_rows": 20}


def calling(worker: Any, words: Callable[..., str]) -> None:
    """A session of 200 words that has called a tool."""
    worker.open(**SMALL)
    worker.turn("s", words(200), max_tokens=4)
    call = pb.ToolCall(id="c", name="look", arguments=json.dumps({"at": "it"}))
    asked = {"role": "user", "content": words(5, seed=1)}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    worker.turn("s", [asked, calls], generate=False)


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


@pytest.mark.parametrize("result_words", [20, 150])
def test_the_users_message_behind_a_result_is_the_signal(
    result_words: int, make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=BLOCK)
    calling(worker, words)
    question = words(6, seed=3)
    told = [result(words(result_words, seed=2)), {"role": "user", "content": question}]
    done = worker.turn("s", told, repair=True, max_tokens=2)
    report = done.repair
    least = len(worker.engine.tokenizer.encode(question))
    assert least < report.signal_tokens < least + 12, "with the template around it, no more"
    assert report.observed_tokens == report.signal_tokens
    assert not report.truncated
    assert report.promoted
    worker.check()


@pytest.mark.parametrize(
    "behind", [[], [{"role": "user", "content": "so"}, {"role": "assistant", "content": "yes"}]]
)
def test_a_result_that_no_message_of_the_user_follows_is_the_signal(
    behind: Sequence[dict[str, str]], make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    worker = make_worker(block_tokens=BLOCK)
    calling(worker, words)
    told = [result(words(20, seed=2)), *behind]
    options = {"generate": False, "keep_distribution": True} if behind else {"max_tokens": 2}
    done = worker.turn("s", told, repair=True, **options)
    assert done.repair.signal_tokens == done.prompt_tokens


def test_what_asks_is_observed_behind_its_context(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    """Its queries are those that it has in the whole signal, and no earlier block is observed."""
    worker = make_worker(block_tokens=BLOCK)
    calling(worker, words)
    resident = worker.engine.resident("s")
    signal = worker.engine.tokenizer.encode(words(120, seed=4))
    whole, blocks = drive(observe_signal(worker.engine, resident, signal))
    asked, observed = drive(observe_signal(worker.engine, resident, signal, asked=9))
    assert (observed, asked.tokens) == (1, 9)
    assert blocks > 1
    assert torch.equal(asked.positions, whole.positions[-9:])
    for ours, theirs in zip(asked.queries, whole.queries, strict=True):
        assert torch.equal(ours, theirs[:, -9:])
