"""Rows that a descent through summaries comes to stand for all rows."""

import pytest
import torch
from torch import Tensor

from kvstore.index.summaries import FANOUT, KeySummaries
from workers.retrieval.descent import Runs, descend
from workers.retrieval.sampling import Ranks, draw, take_best
from workers.retrieval.weights import weigh

HEADS, GROUP, DIM = 2, 3, 8
ROWS = 3005  # 375 nodes and 5 rows more, of these 46 nodes and 7 more


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def descended(keys: Tensor, queries: Tensor, level: int, count: int, rotation: int) -> Runs:
    """The runs of rows that are drawn."""
    summaries, ranks = KeySummaries(), Ranks()
    summaries.extend(keys)

    def choose(weights: Tensor, nodes: Tensor | None, level: int) -> tuple[Tensor, Tensor]:
        if weights.shape[1] <= count:
            return take_best(weights, count)
        numbers = ranks.rotated(HEADS, summaries.count(level) + FANOUT, rotation + level)
        numbers = numbers[:, : weights.shape[1]] if nodes is None else numbers.gather(1, nodes)
        return draw(weights, numbers, count)

    return descend(summaries, queries, level, choose)


def padded(keys: Tensor) -> Tensor:
    """Keys with the rest of the last run, in memory that was never written."""
    rest = torch.full((HEADS, -keys.shape[1] % FANOUT, DIM), torch.nan)
    return torch.cat([keys, rest], 1)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_where_every_node_is_chosen_every_row_is_there_once(level: int) -> None:
    keys = random(HEADS, ROWS, DIM, seed=1)
    runs = descended(keys, random(HEADS, GROUP, DIM, seed=2), level, count=1000, rotation=0)
    positions, raised = runs.nodes()
    for head in range(HEADS):
        there = raised[head] == 0
        assert sorted(positions[head][there].tolist()) == list(range(ROWS))
        assert bool(raised[head][~there].isneginf().all())


@pytest.mark.parametrize("level", [1, 2])
def test_the_rows_of_the_runs_have_the_sums_of_all_rows_on_average(level: int) -> None:
    keys = random(HEADS, ROWS, DIM, seed=3)
    queries = random(HEADS, GROUP, DIM, seed=4)
    values = random(HEADS, ROWS, 1, seed=5)
    logits = torch.einsum("hgd,hnd->hgn", queries, keys).double()
    whole = torch.stack([logits.exp().sum(-1), (logits.exp() @ values.double())[..., 0]])
    found = []
    for rotation in range(200):
        runs = descended(keys, queries, level, count=48, rotation=5 * rotation)
        positions, raised = runs.nodes()
        assert positions.shape[1] <= FANOUT * 49
        at = positions.clamp(max=ROWS - 1)
        some = logits.gather(2, at[:, None].expand(-1, GROUP, -1))
        amounts = (some + raised[:, None]).exp()
        amounts = torch.stack([amounts, amounts * values.gather(1, at[..., None]).mT])
        found.append(amounts.sum(-1))
    each = torch.stack(found)
    error = (each.mean(0) - whole).abs()
    # Draws of neighbouring rotations are not independent: less spread than chance, never more.
    assert bool((error < 5 * each.std(0) / len(found) ** 0.5 + 0.01 * whole[0]).all())
    assert float((each[:, 0] / whole[0] - 1).abs().mean()) < 0.3


def test_a_nodes_weight_grows_with_the_variance_of_its_keys_along_the_query() -> None:
    queries = random(HEADS, 1, DIM, seed=10)
    keys = torch.zeros(HEADS, 16, DIM)
    # The first node's mean is 0, too.
    keys[:, 0:8:2, 0], keys[:, 1:8:2, 0] = 2.0, -2.0
    summaries = KeySummaries()
    summaries.extend(keys)
    seen: list[Tensor] = []

    def choose(weights: Tensor, nodes: Tensor | None, level: int) -> tuple[Tensor, Tensor]:
        seen.append(weights)
        return take_best(weights, 2)

    descend(summaries, queries, 1, choose)
    ratio = seen[0][:, 0] / seen[0][:, 1]
    torch.testing.assert_close(ratio, (queries[:, 0, 0].square() * 4 / 2).exp())


def test_memory_that_was_never_written_has_no_weight() -> None:
    keys = random(HEADS, ROWS, DIM, seed=6)
    queries = random(HEADS, GROUP, DIM, seed=7)
    runs = descended(keys, queries, 2, count=48, rotation=3)
    rows = padded(keys).view(HEADS, -1, FANOUT * DIM)
    some = runs.gather(
        lambda numbers: torch.stack([r[n] for r, n in zip(rows, numbers, strict=True)]).view(
            HEADS, -1, DIM
        )
    )
    positions, raised = runs.nodes()
    weights = weigh(queries, some, raised)
    assert bool(weights.isfinite().all())
    assert bool((weights[positions >= ROWS] == 0).all())
    assert int((positions >= ROWS).sum()) == 3 * HEADS


def test_keys_that_get_all_attention_are_always_come_to() -> None:
    keys = random(HEADS, ROWS, DIM, seed=8)
    queries = random(HEADS, GROUP, DIM, seed=9)
    wanted = 1234
    keys[:, wanted] = 200 * queries.mean(1)
    for rotation in range(20):
        positions, raised = descended(keys, queries, 2, count=16, rotation=rotation).nodes()
        for head in range(HEADS):
            at = (positions[head] == wanted).nonzero()
            assert len(at) >= 1
            assert float(raised[head][at].max()) == 0
