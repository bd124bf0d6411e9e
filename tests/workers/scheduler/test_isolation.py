"""A pass or a sampling that fails for several sessions ends only the turns that fail alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.cache.forward_step import ForwardStep
from workers.generation import sampling
from workers.generation.sampling import Sampler

METHODS = {"a": "snapkv", "b": "h2o", "c": "kvzip", "d": "full"}
# Steps fail where torch computes them.
LIMITS = {"block_tokens": 24, "recent": 8, "slots": 4, "native_attention": False}
update = ForwardStep.update


def talk(worker: Any, words: Callable[..., str]) -> dict[str, Any]:
    """Two turns in each session at the same time; the tokens of both, or the error."""
    for name, method in METHODS.items():
        worker.open(name, method=method, budget=1024 if method == "full" else 60)
    said: dict[str, Any] = {}
    for number in range(2):
        turns = {
            name: worker.submit(name, words(40, seed=number), max_tokens=24)
            for name in METHODS
            if not isinstance(said.get(name), BaseException)
        }
        wait(turns.values(), timeout=600)
        for name, turn in turns.items():
            said[name] = turn.exception() or [*said.get(name, []), *turn.result().token_ids]
    return said


def failing(fails: Callable[[ForwardStep], bool], error: Exception) -> Callable[..., Any]:
    """`ForwardStep.update` that raises in the second layer of decoding steps that `fails` names."""

    def update_or_fail(
        step: ForwardStep, keys: Tensor, values: Tensor, layer: int, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        if layer == 1 and step.query_positions.shape[1] == 1 and fails(step):
            raise error
        return update(step, keys, values, layer, *rest, **named)

    return update_or_fail


def test_sessions_go_on_alone_where_memory_is_too_small_for_all(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talk(make_worker(**LIMITS), words)
    passes = []

    def too_many(step: ForwardStep) -> bool:
        passes.append(step.slot_list)
        return len(step.slot_list) > 1

    monkeypatch.setattr(ForwardStep, "update", failing(too_many, torch.OutOfMemoryError("full")))
    worker = make_worker(**LIMITS)
    assert talk(worker, words) == expected
    assert any(len(slots) > 1 for slots in passes), "they were tried together"
    worker.check()


def test_the_session_that_fails_alone_fails_and_the_others_go_on(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = talk(make_worker(**LIMITS), words)
    worker = make_worker(**LIMITS)

    def is_of_b(step: ForwardStep) -> bool:
        session = worker.engine.sessions["b"]
        return session.slot in step.slot_list and session.length > 110

    monkeypatch.setattr(ForwardStep, "update", failing(is_of_b, ValueError("a bad row")))
    said = talk(worker, words)
    assert isinstance(said.pop("b"), ValueError)
    assert said == {name: tokens for name, tokens in expected.items() if name != "b"}
    worker.check()


def test_sessions_that_decode_together_are_read_in_the_order_of_their_slots(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = []

    def record(step: ForwardStep) -> bool:
        orders.append(step.slot_list)
        return False

    monkeypatch.setattr(ForwardStep, "update", failing(record, ValueError()))
    talk(make_worker(**LIMITS), words)
    assert any(len(order) > 1 for order in orders)
    assert all(order == sorted(order) for order in orders)


def test_a_session_that_cannot_be_sampled_fails_and_the_others_get_the_same_tokens(
    make_worker: Callable[..., Any], words: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has one random number, also where the sampling of all failed after the draw."""
    mark = 33
    sampled_with_b = []

    def answer(worker: Any) -> dict[str, Any]:
        options = {"a": {}, "b": {"top_k": mark}, "c": {}}
        for name in options:
            worker.open(name, method="full", budget=1024)
        turns = {
            name: worker.submit(name, words(40), max_tokens=24, temperature=1.0, seed=7, **option)
            for name, option in options.items()
        }
        wait(turns.values(), timeout=600)
        return {
            name: each.exception() or [*each.result().token_ids] for name, each in turns.items()
        }

    def fail_behind_the_draw(logits: Tensor, tokens: Tensor, samplers: Sequence[Sampler]) -> None:
        if all(each.top_k != mark for each in samplers):
            return
        sampled_with_b.append(len(samplers))
        if max(sampled_with_b) > 1:  # from when it has joined the others
            raise ValueError("a bad sampler")

    expected = answer(make_worker(**LIMITS))
    monkeypatch.setattr(sampling, "_report", fail_behind_the_draw)
    worker = make_worker(**LIMITS)
    found = answer(worker)
    assert isinstance(found.pop("b"), ValueError)
    assert found == {name: expected[name] for name in "ac"}
    assert max(sampled_with_b) > 1, "it failed among others"
    worker.check()
