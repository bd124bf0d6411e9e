"""Retrieval behind the model's window: what is found among keys that are turned to where they are seen."""

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from benchmarks.made_up_copy import add_rows
from kvrecall.domain.settings.retrieval import Retrieval
from tests.workers.retrieval.test_retriever import DIM, GROUP, HEADS, make_retriever, padded
from workers.positions.chunks import Chunks
from workers.positions.rotation import Rotation
from workers.positions.seen_rows import SeenRows
from workers.positions.tables import RotationTables
from workers.retrieval.retriever import Retriever

ROWS = 700
TABLES = RotationTables([Rotation((1.0, 0.2, 0.03, 0.004))])
SEEN = SeenRows(TABLES, Chunks(200, 64).find_segments(ROWS))
ACTIVE = padded([[3, 650], [0]])


def make(keys: Tensor, count: int, **settings: str) -> Retriever:
    made = make_retriever(TypeAdapter(Retrieval).validate_python(settings), count)
    add_rows(made.copy, [(keys, torch.zeros_like(keys))])
    for _ in made.copy.index_rows():
        pass
    return made


@pytest.mark.parametrize(
    ("index", "choice"), [("exact", "best"), ("tree", "best"), ("tree", "sample")]
)
def test_a_search_finds_what_it_finds_among_turned_keys(index: str, choice: str) -> None:
    """Of a tree's candidates, too, which hold what the queries of any segment come to."""
    random = torch.Generator().manual_seed(2)
    keys = torch.randn(HEADS, ROWS, DIM, generator=random)
    queries = torch.randn(HEADS, GROUP, DIM, generator=random)
    stored = make(keys, 12, index=index, choice=choice)
    # So few rows are all scored, by their keys.
    turned = make(SEEN.turn_run(0, keys), 12, index="summaries", choice=choice)
    found = stored.find(0, queries, ACTIVE, 0.5, SEEN)
    expected = turned.find(0, queries, ACTIVE, 0.5)
    assert torch.equal(found.positions.sort().values, expected.positions.sort().values)
    order, other = found.positions.argsort(), expected.positions.argsort()
    assert torch.allclose(found.bias.gather(1, order), expected.bias.gather(1, other), atol=1e-4)
    places = order[..., None].expand(-1, -1, DIM), other[..., None].expand(-1, -1, DIM)
    assert torch.allclose(
        found.keys.gather(1, places[0]), expected.keys.gather(1, places[1]), atol=1e-4
    )


def test_a_descent_comes_to_the_row_of_most_weight_in_every_segment() -> None:
    random = torch.Generator().manual_seed(3)
    queries = torch.randn(HEADS, 1, DIM, generator=random).expand(-1, GROUP, -1)
    asked = SEEN.turn_queries(0, queries)[:, :, 0]
    segments = SEEN.find_segments(torch.arange(ROWS))
    for position in (1, 40, 130, 199, 200, 420, 600, 699):
        keys = torch.randn(HEADS, ROWS, DIM, generator=random) * 0.3
        keys[:, position] = 4 * asked[segments[position]]
        made = make(keys, 8, index="summaries", choice="sample")
        found, bias = made.search(0, queries, ACTIVE, 1.0, SEEN)
        for head in range(HEADS):
            at = found[head].tolist().index(position)
            assert float(bias[head, at]) == 0.0, "it stands for itself alone"
