"""Operations on a cache that several tests begin with."""

from collections.abc import Callable

import pytest
import torch

from workers.cache.active_cache import ActiveCache
from workers.cache.forward_step import ForwardStep


@pytest.fixture
def fill() -> Callable[..., None]:
    """fill(cache, slot, tokens, value): append rows of one value to every layer."""

    def append(cache: ActiveCache, slot: int, tokens: int, value: float = 1.0) -> None:
        step = ForwardStep(cache, [slot], torch.arange(tokens)[None])
        rows = torch.full((1, cache.shape.n_kv_heads, tokens, cache.shape.head_dim), value)
        for layer in range(cache.shape.n_layers):
            step.update(rows, rows, layer)

    return append


@pytest.fixture
def keep_uneven() -> Callable[..., None]:
    """keep_uneven(cache, slot, layer, few): keep `few` rows of the first head."""

    def keep(cache: ActiveCache, slot: int, layer: int, few: int) -> None:
        n = cache.longest_heads(slot)[layer]
        indices = torch.arange(n).repeat(2, 1)
        indices[0, few:] = -1
        cache.keep(slot, layer, indices)

    return keep
