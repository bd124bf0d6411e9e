"""A forward pass depends on no tensor's values: one graph of it serves every step of its shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import make_fx

from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.model.loader import LoadedModel, load_model
from workers.model.weights.quantized_linear import Quantization

SLOTS = [0, 1]
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.fixture
def model(model_path: Callable[[str], Any]) -> LoadedModel:
    return load_model(model_path("llama"), dtype=torch.float32)


@pytest.fixture
def cache(model: LoadedModel, request: pytest.FixtureRequest) -> ActiveCache:
    """Two slots of 20 and 13 tokens; "uneven": with other indices, and heads of other lengths."""
    shape = model.shape
    cache = ActiveCache(shape, len(SLOTS), [64] * shape.n_layers)
    bounds = [[64, 64], [64, 64] if request.param == "even" else [100, 28]]
    for slot, tokens in zip(SLOTS, (20, 13), strict=True):
        assert cache.claim(bounds[slot]) == slot
        model.forward(torch.arange(tokens)[None], new_step(cache, [slot], tokens, start=0))
    if request.param == "uneven":
        kept = torch.arange(13).repeat(shape.n_kv_heads, 1)
        kept[0, 4:] = -1
        cache.keep(1, 0, kept)
    return cache


def new_step(
    cache: ActiveCache, slots: list[int], tokens: int, start: int, *, static: bool = False
) -> ForwardStep:
    positions = (start + torch.arange(tokens)).expand(len(slots), -1)
    return ForwardStep(cache, slots, positions, observe=tokens, static=static)


def run_pass(model: LoadedModel, step: ForwardStep, token_ids: Tensor) -> tuple[Tensor, ...]:
    """All that the engine takes from a pass."""
    logits = model.forward(token_ids, step)
    return logits, step.rows, step.observed_queries


def run_without_data(model: LoadedModel, step: ForwardStep) -> tuple[Tensor, ...]:
    """A pass over tensors that have shapes and no values: a call that needs a value raises."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        positions = mode.from_tensor(step.query_positions)
        bound = step.rebind(positions, mode.from_tensor(step.control))
        return run_pass(model, bound, torch.zeros_like(positions, dtype=torch.int64))


EVERY_CACHE = pytest.mark.parametrize("cache", ["even", "uneven"], indirect=True)


@EVERY_CACHE
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("static", [False, True])
def test_a_pass_needs_no_data(
    tokens: int, static: bool, model: LoadedModel, cache: ActiveCache
) -> None:
    step = new_step(cache, SLOTS, tokens, start=20, static=static)
    logits, rows, observed = run_without_data(model, step)
    shape = model.shape
    assert rows.shape == (2, shape.n_layers, 2, shape.n_kv_heads, tokens, shape.head_dim)
    assert observed.shape == (2, shape.n_layers, shape.n_heads, tokens, shape.head_dim)
    assert logits.shape[:2] == (2, 1)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_decode_step_over_few_bits_needs_no_data(
    quantize: Quantization, model_path: Callable[[str], Any]
) -> None:
    model = load_model(model_path("llama"), pack=False, quantize=quantize)
    cache = ActiveCache(model.shape, 1, [64] * model.shape.n_layers, model.dtype)
    step = new_step(cache, [cache.claim(cache.rows)], 1, start=0, static=True)
    logits, _, _ = run_without_data(model, step)
    assert logits.shape[:2] == (1, 1)


@pytest.mark.parametrize("cache", ["even"], indirect=True)
@pytest.mark.parametrize(
    "call",
    [
        lambda query: query.sum().item(),
        lambda query: query.nonzero(),
        lambda query: query[query > 0],
        lambda query: bool(query.any()),
        lambda query: query.flatten().tolist(),
    ],
)
def test_a_call_that_waits_for_data_is_found(
    call: Callable[[Tensor], object],
    model: LoadedModel,
    cache: ActiveCache,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tests above would say of such a call in a pass."""
    record = ForwardStep.record

    def waiting(step: ForwardStep, queries: Tensor) -> None:
        call(queries)
        record(step, queries)

    monkeypatch.setattr(ForwardStep, "record", waiting)
    step = new_step(cache, SLOTS, 1, start=20)
    with pytest.raises(NEEDS_DATA):
        run_without_data(model, step)


@EVERY_CACHE
def test_one_graph_serves_every_decode_step_of_a_batch(
    model: LoadedModel, cache: ActiveCache
) -> None:
    """Captured at the first step; its only inputs are the tokens, their positions and `control`."""
    first = new_step(cache, SLOTS, 1, start=20, static=True)

    def decode(token_ids: Tensor, positions: Tensor, control: Tensor) -> tuple[Tensor, ...]:
        return run_pass(model, first.rebind(positions, control), token_ids)

    def capture(step: ForwardStep) -> Any:
        inputs = torch.tensor([[3], [4]]), step.query_positions, step.control
        with torch.inference_mode():
            return make_fx(decode, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)

    graph = capture(first)
    addresses = cache.pool.memories[0].keys.data_ptr(), cache.pool.memories[0].values.data_ptr()
    for index in range(6):
        token_ids = torch.tensor([[5 + index], [40 - index]])
        step = new_step(cache, SLOTS, 1, start=21 + index, static=True)
        with torch.inference_mode():
            replayed = graph(token_ids, step.query_positions, step.control)
        pool = [tensor.clone() for tensor in cache.pool.memories[0].tensors()]
        step.undo()
        exact = new_step(cache, SLOTS, 1, start=21 + index)
        for found, expected in zip(replayed, run_pass(model, exact, token_ids), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)
        for found, expected in zip(pool, cache.pool.memories[0].tensors(), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)
        assert capture(step).code == graph.code
    assert (
        cache.pool.memories[0].keys.data_ptr(),
        cache.pool.memories[0].values.data_ptr(),
    ) == addresses
