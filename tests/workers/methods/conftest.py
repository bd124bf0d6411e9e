"""Rows of one layer, drawn from a seed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from workers.cache.active_cache import EMPTY
from workers.methods import LayerRows

HEADS = 4
HEAD_DIM = 8


def draw_rows(
    positions: Sequence[Sequence[int]], seed: int = 0, tokens: int = 5, **changes: Any
) -> LayerRows:
    """Rows at ascending positions per KV head, random keys, and the last tokens' queries."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, positions))
    end = max((max(head) for head in positions if head), default=0) + 1
    tokens = min(tokens, end)
    drawn: dict[str, Any] = {
        "layer": 1,
        "keys": torch.randn(len(positions), width, HEAD_DIM, generator=generator),
        "values": torch.randn(len(positions), width, HEAD_DIM, generator=generator),
        "positions": torch.tensor(
            [[*head, *[EMPTY] * (width - len(head))] for head in positions], dtype=torch.int32
        ),
        "queries": torch.randn(HEADS, tokens, HEAD_DIM, generator=generator),
        "query_positions": torch.arange(end - tokens, end, dtype=torch.int32),
        "accumulated": torch.rand(len(positions), width, generator=generator),
        "end": end,
        "seed": 9,
    }
    return LayerRows(**drawn | changes)


@pytest.fixture(scope="session")
def make_rows() -> Callable[..., LayerRows]:
    """make_rows(positions, seed, tokens, **fields): `draw_rows`; fields replace drawn ones."""
    return draw_rows


@pytest.fixture
def rows() -> LayerRows:
    """24 rows in one head, 20 in the other, at even positions, the last 5 tokens observed."""
    return draw_rows(
        [range(0, 48, 2), range(0, 40, 2)], end=48, query_positions=torch.arange(43, 48)
    )
