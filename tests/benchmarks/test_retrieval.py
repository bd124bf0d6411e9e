"""A step of retrieval at a small size, with every arm and its ratio."""

import torch

from benchmarks.made_up_copy import build_copy
from benchmarks.retrieval import (
    INDEXES,
    KERNELS,
    SHAPES,
    Plan,
    kernel_arms,
    make_rows,
    time_step,
)
from kvrecall.domain.settings.retrieval import Retrieval
from kvstore.format.page import PageLayout
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.retrieval.retriever import Retriever
from workers.retrieval.step import RetrievalStep


def test_a_step_is_timed_with_its_parts() -> None:
    rows = list(time_step(1000, "SmolLM2", Plan(rounds=2, budget=64)))
    metrics = {row["metric"]: row for row in rows}
    for index in INDEXES:
        assert {index, f"{index}: search", f"{index}: reading", f"{index}: attention"} <= set(
            metrics
        )
        assert metrics[f"full attention / {index}"]["n"] == 2
    assert all(row["median"] > 0 for row in rows)


def test_the_arms_of_kernels_compute_the_step_that_torch_does() -> None:
    """Here by their interpreter, on the CPU."""
    heads, _, dim = SHAPES["7B"]
    keys, values, queries = make_rows(500, "7B", seed=0)
    active = torch.arange(484, 500)
    positions = active.int().expand(1, heads, -1).contiguous()
    rows = (keys[:, :, active], values[:, :, active], positions)
    layout = PageLayout(1, heads, dim, torch.float32, "made up")
    settings = Retrieval(index="exact")
    retriever = Retriever(build_copy(layout, settings, [(keys[0], values[0])]), settings, 48)
    step = RetrievalStep([retriever], Transfers(torch.device("cpu")))
    expected = step.attend(0, queries, rows, None, Logits(dim**-0.5))
    arms = kernel_arms(retriever, queries, rows)
    assert tuple(arms) == KERNELS
    for attend in arms.values():
        torch.testing.assert_close(attend(), expected, atol=1e-5, rtol=1e-5)
