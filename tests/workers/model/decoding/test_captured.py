"""Turns of real workers whose steps are captured, beside turns whose steps are not.

What a graph of a GPU does is done here by running the work again over the graph's inputs, into one memory of results.
"""

import gc
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.model.decoding.captured import CapturedSteps
from workers.model.loader import LoadedModel

LIMITS: dict[str, Any] = {"block_tokens": 64, "max_budget": 256, "native_attention": False}
TOKENS = 40
# An example runs up to 80 passes.
FEWER = settings(max_examples=settings().max_examples // 5)


class Repeats:
    """Stands for a GPU's capture: each repetition overwrites the results of the one before."""

    def __init__(self) -> None:
        self.captured = self.repeated = 0

    def __call__(self, work: Callable[[], Any]) -> Callable[[], Any]:
        self.captured += 1
        results = work()
        names = [each.name for each in fields(results)]

        def replay() -> Any:
            self.repeated += 1
            new = work()
            with torch.inference_mode():
                for name in names:
                    kept = getattr(results, name)
                    if isinstance(kept, Tensor):
                        kept.copy_(getattr(new, name))
            return results

        return replay


@pytest.fixture
def repeats() -> Repeats:
    return Repeats()


@pytest.fixture
def make(make_worker: Callable[..., Any], repeats: Repeats) -> Callable[..., Any]:
    """make(captures, most, **settings): a worker, whose steps are captured or not."""

    def make(captures: bool, most: int = 16, **settings: Any) -> Any:
        worker = make_worker("llama", **LIMITS, **settings)
        if captures:
            forward = worker.engine.model.forward
            worker.engine.decoder = CapturedSteps(forward, repeats, most)
        return worker

    return make


def ask(worker: Any, name: str, text: str) -> Any:
    return worker.submit(name, text, max_tokens=TOKENS, min_tokens=TOKENS)


def fill(model: LoadedModel, uneven: bool) -> ActiveCache:
    """Three slots of 20, 13 and 20 tokens; uneven: with heads of other lengths in the second one."""
    shape = model.shape
    cache = ActiveCache(shape, 3, [400] * shape.n_layers)
    for slot, tokens in enumerate((20, 13, 20)):
        assert cache.claim([400] * shape.n_layers) == slot
        positions = torch.arange(tokens)[None]
        model.forward(torch.arange(tokens)[None] + slot, ForwardStep(cache, [slot], positions))
    if uneven:
        kept = torch.arange(13).repeat(shape.n_kv_heads, 1)
        kept[0, 4:] = -1
        cache.keep(1, 0, kept)
    return cache


Batch = tuple[list[int], int]
BATCHES = st.tuples(
    st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=3), st.integers(0, 1)
)


@FEWER
@given(batches=st.lists(BATCHES, min_size=6, max_size=20), uneven=st.booleans())
def test_each_pass_gives_what_torch_does_whatever_ran_before(
    batches: list[Batch], uneven: bool, loaded: Callable[[str], LoadedModel]
) -> None:
    """Slots in any order, whose queries are observed or not. What a pass gave stays as it was."""
    model, repeats = loaded("llama"), Repeats()
    steps = CapturedSteps(model.forward, repeats, 16)
    given_back = []
    for forward in (model.forward, steps.forward):
        cache, passes = fill(model, uneven), list[tuple[Tensor, ForwardStep]]()
        lengths = torch.tensor([20, 13, 20])
        # Twice, so that most are captured and repeated.
        for number, (slots, observe) in enumerate([*batches, *batches]):
            positions = lengths[slots][:, None]
            step = ForwardStep(cache, slots, positions, observe, static=True)
            assert steps.takes(step)
            logits = forward(3 + torch.arange(len(slots))[:, None] + number, step)
            passes.append((logits, step))
            lengths[slots] += 1
        results = [[logits, step.rows, *step.observed] for logits, step in passes]
        given_back.append([*results, list(cache.pool.memories[0].tensors())])
    torch.testing.assert_close(given_back[1], given_back[0], equal_nan=True)
    assert repeats.captured > 0


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o", "adakv", "streaming_llm"])
def test_an_answer_is_the_same_and_leaves_the_same_rows(
    method: str, make: Callable[..., Any], words: Callable[..., str], repeats: Repeats
) -> None:
    """Whatever the method observes of the steps; it evicts in the middle of the second answer."""
    said = []
    for captures in (False, True):
        worker = make(captures)
        worker.open("s", budget=96, method=method)
        answers = [
            list(ask(worker, "s", words(40, seed=seed)).result(300).token_ids) for seed in range(2)
        ]
        engine = worker.engine
        kept = engine.session("s").active_selection(engine.cache)
        said.append((answers, [each.tolist() for each in kept.positions]))
        worker.check()
    assert said[0] == said[1]
    assert repeats.repeated > TOKENS
    assert repeats.captured < repeats.repeated / 4


def test_sessions_that_come_and_go_in_a_batch_answer_the_same(
    make: Callable[..., Any], words: Callable[..., str], repeats: Repeats
) -> None:
    said = []
    for captures in (False, True):
        worker = make(captures)
        turns = []
        for index, method in enumerate(("full", "snapkv", "snapkv")):
            worker.open(str(index), budget=96, method=method)
            turns.append(ask(worker, str(index), words(30 + 20 * index, seed=index)))
        said.append([list(turn.result(300).token_ids) for turn in turns])
        worker.check()
    assert said[0] == said[1]
    assert repeats.repeated > TOKENS


def test_steps_with_retrieval_draw_and_count_the_same(
    make: Callable[..., Any], words: Callable[..., str], repeats: Repeats
) -> None:
    """By kernels, whose description of the stored rows is an input of the graph. Of two sessions in turn."""
    said = []
    for captures in (False, True):
        worker = make(captures, device_codes_bytes=1 << 30)
        answers = []
        for name in "st":
            worker.open(name, budget=64, method="icecache")
            done = worker.turn(name, words(150, seed=ord(name)), max_tokens=5, min_tokens=5)
            answers.append((list(done.token_ids), done.retrieval.rows, done.retrieval.steps))
        said.append(answers)
    assert said[0] == said[1]
    assert all(rows > 0 for _, rows, _ in said[0])
    assert repeats.repeated >= 4


def test_only_so_many_graphs_are_kept(
    make: Callable[..., Any], words: Callable[..., str], repeats: Repeats
) -> None:
    """One, for two sessions in other slots: each has to be captured anew."""
    worker = make(True, most=1)
    for name in ("s", "t"):
        worker.open(name, budget=96, method="full")
    for seed in range(2):
        for name in ("s", "t"):
            ask(worker, name, words(20, seed=seed)).result(300)
    assert 2 <= repeats.captured <= 4


def test_a_graph_keeps_nothing_of_a_session(
    make: Callable[..., Any], words: Callable[..., str], repeats: Repeats
) -> None:
    worker = make(True, device_codes_bytes=1 << 30)
    worker.open("s", budget=64, method="icecache")
    worker.turn("s", words(150), max_tokens=5, min_tokens=5)
    assert repeats.repeated > 0
    copy = ref(worker.engine.session("s").host_copy)
    assert copy() is not None
    worker.engine.unload("s").result(60)
    gc.collect()
    assert copy() is None


def test_a_capture_that_fails_leaves_all_steps_to_torch(
    make_worker: Callable[..., Any], words: Callable[..., str]
) -> None:
    tried = []

    def refuse(work: Callable[[], Any]) -> Callable[[], Any]:
        tried.append(work)
        raise RuntimeError("an operation is not permitted while a stream is captured")

    said = []
    for captures in (False, True):
        worker = make_worker("llama", **LIMITS)
        if captures:
            worker.engine.decoder = CapturedSteps(worker.engine.model.forward, refuse, 16)
        worker.open("s", budget=96, method="snapkv")
        said.append(list(ask(worker, "s", words(40)).result(300).token_ids))
    assert said[0] == said[1]
    assert len(tried) == 1
