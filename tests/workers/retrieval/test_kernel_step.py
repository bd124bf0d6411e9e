"""Decode steps by kernels: a model's logits, and one graph of all steps, which waits for no value."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.made_up_copy import build_copy
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from tests.workers.made_up_step import CPU, Shape, make
from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.cache.logits import Logits
from workers.kernels import operator
from workers.kernels.attention import KernelAttention
from workers.metrics.catalogue import create_metrics
from workers.model.loader import LoadedModel
from workers.retrieval.kernel_step import KernelStep
from workers.retrieval.retriever import RetrievalCounts, Retriever
from workers.retrieval.sampling import ROTATIONS
from workers.retrieval.step import RetrievalStep

HOST, DEVICE = torch.device("cpu"), torch.device("cuda:0")
SLOTS = [0, 1]
STORED = 300


@pytest.fixture
def model(loaded: Callable[[str], LoadedModel]) -> LoadedModel:
    return loaded("llama")


@pytest.fixture
def cache(model: LoadedModel) -> ActiveCache:
    """Two slots of 20 and 13 tokens behind the stored ones."""
    shape = model.shape
    cache = ActiveCache(shape, len(SLOTS), [64] * shape.n_layers)
    for slot, tokens in zip(SLOTS, (20, 13), strict=True):
        assert cache.claim([64] * shape.n_layers) == slot
        model.forward(torch.arange(tokens)[None], new_step(cache, [slot], tokens, STORED))
    return cache


@pytest.fixture
def kernels() -> KernelAttention:
    return KernelAttention(CPU, ROTATIONS)


def new_step(cache: ActiveCache, slots: list[int], tokens: int, start: int) -> ForwardStep:
    positions = (start + torch.arange(tokens)).expand(len(slots), -1)
    return ForwardStep(cache, slots, positions, static=tokens == 1)


def begin_pass(retrievers: Sequence[Retriever | None], kernels: KernelAttention) -> KernelStep:
    """A pass by kernels, whose codes are on the host, which is the device."""
    searched = [None if each is None else each.searched_rows(0) for each in retrievers]
    return KernelStep(
        retrievers, kernels, kernels.describe(searched), RetrievalStep(retrievers, CPU)
    )


def make_retriever(model: LoadedModel, length: int, seed: int) -> Retriever:
    """A session with so many stored rows."""
    shape = model.shape
    layout = PageLayout(shape.n_layers, shape.n_kv_heads, shape.head_dim, torch.float32, "made up")
    random = torch.Generator().manual_seed(seed)
    sizes = (shape.n_layers, 2, shape.n_kv_heads, length, shape.head_dim)
    rows = torch.randn(sizes, generator=random)
    settings = Retrieval(index="exact")
    return Retriever(build_copy(layout, settings, [(k, v) for k, v in rows]), settings, 24)


@pytest.mark.parametrize("kept", [SLOTS, SLOTS[:1]])
def test_a_models_step_has_the_logits_and_counts_of_torchs(
    kept: list[int], model: LoadedModel, cache: ActiveCache, kernels: KernelAttention
) -> None:
    """Of two sessions the second one may have no retrieval."""
    retrievers = [make_retriever(model, STORED, slot) if slot in kept else None for slot in SLOTS]
    tokens = torch.tensor([[3], [4]])
    logits = list[Tensor]()
    counts = list[list[RetrievalCounts]]()
    for retrieval in (begin_pass(retrievers, kernels), RetrievalStep(retrievers, CPU)):
        step = new_step(cache, SLOTS, 1, STORED + 20)
        step.retrieval = retrieval
        logits.append(model.forward(tokens, step))
        step.undo()
        retrieval.measure(create_metrics())
        counts.append([replace(each.counts, seconds=0) for each in retrievers if each is not None])
        for each in retrievers:
            if each is not None:
                each.begin_turn()
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
    assert counts[0] == counts[1]
    assert all(each.steps == 1 and each.rows > 0 for each in counts[0])


def test_one_graph_serves_every_step_of_a_batch(
    model: LoadedModel, cache: ActiveCache, kernels: KernelAttention
) -> None:
    """Captured of tensors without values. Its inputs are tokens, positions, `control` and the table of stored rows."""

    def decode(
        token_ids: Tensor, positions: Tensor, control: Tensor, described: Tensor
    ) -> tuple[Tensor, Tensor]:
        step = first.rebind(positions, control)
        retrieval = step.retrieval = searched.rebind(described)
        return model.forward(token_ids, step), retrieval.found

    first = new_step(cache, SLOTS, 1, STORED + 20)
    retrievers = [make_retriever(model, STORED, slot) for slot in SLOTS]
    searched = begin_pass(retrievers, kernels)
    table = searched.table
    inputs = torch.tensor([[3], [4]]), first.query_positions, first.control, table.described
    with torch.inference_mode():
        graph: Any = make_fx(decode, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    layers = [node for node in graph.graph.nodes if "attend_drawn" in str(node.target)]
    assert len(layers) == model.shape.n_layers
    first.undo()
    for index in range(3):
        # Other sessions, with other rows.
        others = [make_retriever(model, STORED - 30 * index - slot, 9 + slot) for slot in SLOTS]
        found = kernels.describe([each.searched_rows(0) for each in others])
        assert found.shapes == table.shapes
        token_ids = torch.tensor([[5 + index], [40 - index]])
        step = new_step(cache, SLOTS, 1, STORED + 20 + index)
        with torch.inference_mode():
            logits, counted = graph(token_ids, step.query_positions, step.control, found.described)
        step.undo()
        exact = new_step(cache, SLOTS, 1, STORED + 20 + index)
        exact.retrieval = RetrievalStep(others, CPU)
        expected = model.forward(token_ids, exact)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        assert counted.sum((0, 2)).tolist() == [each.counts.rows for each in others]


def test_attention_that_kernels_do_not_compute_is_the_hosts(kernels: KernelAttention) -> None:
    """Logits with a soft cap: draws, output and counts of a pass by the host."""
    made = make(Shape([(200, 20), None]))
    logits = Logits(1.0, softcap=5.0)
    arguments = (made.shape.layer, made.queries, made.rows, made.mask, logits)
    expected = RetrievalStep(made.retrievers, CPU).attend(*arguments)
    counts = made.retrievers[0].counts if made.retrievers[0] else None
    step = begin_pass(made.retrievers, kernels)
    torch.testing.assert_close(step.attend(*arguments), expected)
    step.measure(create_metrics())
    assert made.retrievers[0] is not None
    assert counts is not None
    assert made.retrievers[0].counts.rows == 2 * counts.rows > 0


class Arrived(AssertionError):
    """An operation that brought something from the device to the host."""


class OneWay(TorchDispatchMode):
    """Refuses operations whose tensors are on the device, and whose results are on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = (
            {each.device for each in tree_leaves(some) if isinstance(each, Tensor)}
            for some in (args, result)
        )
        if DEVICE in given and HOST in made:
            raise Arrived(str(func))
        return result


class Launches:
    """Stands for a kernel on a device that is not here: checks what it is launched with."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **sizes: int) -> None:
            for each in arguments:
                assert isinstance(each, (int, float)) or (
                    isinstance(each, Tensor) and each.device == DEVICE
                )
            assert all(type(size) in (int, bool) for size in sizes.values())
            self.grids.append(grid)

        return launch


def launch_without_values(call: Callable[..., object]) -> None:
    """Call `operator.launch`, or what stands for it, with tensors of a GPU that have shapes alone."""
    with FakeTensorMode(), OneWay():
        numbers: dict[str, Any] = {"dtype": torch.bfloat16, "device": DEVICE}
        queries = torch.empty(3, 4, 7, 128, **numbers)
        rows = torch.empty(3, 4, 64, 128, **numbers)
        positions = torch.empty(3, 4, 64, dtype=torch.int32, device=DEVICE)
        mask = torch.empty(3, 4, 64, **numbers)
        described = torch.empty(3, 2 + 2 * 8, dtype=torch.int64, device=DEVICE)
        ranks = torch.empty(3000, device=DEVICE)
        call(
            *(queries, rows, rows, positions, mask, described, ranks, 8, 64, 512, 192),
            *([0, 256], [0, 4096], [37, ROTATIONS, 0, 256], 0.1),
        )


def test_the_launch_of_a_layer_brings_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    for name in ("score", "weigh", "draw", "attend"):
        monkeypatch.setattr(operator, name, launches)
    launch_without_values(operator.launch)
    assert launches.grids == [(12, 2), (12, 2), (12,), (12,)]


@pytest.mark.parametrize(
    "read",
    [lambda ranks: ranks.cpu(), lambda ranks: ranks.sum().item(), lambda ranks: ranks.tolist()],
)
def test_a_call_that_brings_something_to_the_host_is_found(
    read: Callable[[Tensor], object],
) -> None:
    with pytest.raises(Exception, match=r"_to_copy|_local_scalar_dense|data_ptr|tolist"):
        launch_without_values(lambda *arguments: read(arguments[6]))
