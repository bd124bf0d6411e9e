"""Attention over the active rows of several slots equals attention written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from workers.cache.active_cache import EMPTY, ActiveCache
from workers.cache.forward_step import ForwardStep
from workers.errors import ModelRefused
from workers.model.layers.attention import active_attention, run_pass


class Attention(nn.Module):
    """An attention module of a model, as far as the attention function reads it."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1]])
def test_a_query_sees_its_own_slots_rows_that_are_not_after_it(
    tokens: int, order: list[int], make_cache: Callable[..., ActiveCache]
) -> None:
    """Slots of different lengths with uneven heads; the module's own scale."""
    cache = make_cache()
    generator = torch.Generator().manual_seed(6)
    for slot, tokens_before in enumerate((9, 4, 0)):
        assert cache.claim([16, 12]) == slot
        if tokens_before:
            step = ForwardStep(cache, [slot], torch.arange(tokens_before)[None])
            step.update(*torch.randn(2, 1, 2, tokens_before, 4, generator=generator), 0)
    cache.keep(0, 0, torch.tensor([[0, 3, 5, 8], [1, 7, -1, -1]]))
    starts = torch.tensor([{0: 9, 1: 4, 2: 0}[slot] for slot in order])
    step = ForwardStep(cache, order, starts[:, None] + torch.arange(tokens), observe=tokens)
    new_keys, new_values = torch.randn(2, len(order), 2, tokens, 4, generator=generator)
    keys, values = step.update(new_keys, new_values, 0)
    module = Attention(layer_idx=0)
    queries = torch.randn(len(order), 4, tokens, 4, generator=generator)
    with run_pass(step):
        out, weights = active_attention(module, queries, keys, values, None, scaling=0.3)
    assert weights is None
    # In the scale of the head, so that scores are those of the model's own logits.
    assert torch.allclose(step.observed[0], queries * 0.3 * 4**0.5)
    for index, slot in enumerate(order):
        for head in range(4):
            resident_keys, resident_values, resident_positions = cache.get_rows(slot, 0)
            positions = resident_positions[head // 2]
            for token in range(tokens):
                seen = (positions != EMPTY) & (positions <= starts[index] + token)
                logits = 0.3 * resident_keys[head // 2, seen] @ queries[index, head, token]
                expected = logits.softmax(0) @ resident_values[head // 2, seen]
                assert torch.allclose(out[index, token, head], expected, atol=1e-5)


def test_the_default_scale_is_that_of_the_head(make_cache: Callable[..., ActiveCache]) -> None:
    cache = make_cache()
    step = ForwardStep(cache, [cache.claim([16, 12])], torch.arange(2)[None])
    keys, values = step.update(*torch.randn(2, 1, 2, 2, 4), 0)
    module = Attention(layer_idx=0)
    queries = torch.randn(1, 4, 2, 4)
    with run_pass(step):
        default, _ = active_attention(module, queries, keys, values, None)
        given, _ = active_attention(module, queries, keys, values, None, scaling=1 / math.sqrt(4))
    assert torch.allclose(default, given)


@pytest.mark.parametrize("extra", ["position_bias", "head_mask", "indices"])
def test_unsupported_attention_is_refused(
    extra: str, make_cache: Callable[..., ActiveCache]
) -> None:
    cache = make_cache()
    step = ForwardStep(cache, [cache.claim([16, 12])], torch.arange(1)[None])
    rows = torch.ones(1, 2, 1, 4)
    with run_pass(step), pytest.raises(ModelRefused, match=extra):
        active_attention(
            nn.Module(),
            torch.ones(1, 4, 1, 4),
            rows,
            rows,
            None,
            None,
            0.0,
            None,
            None,
            **{extra: 3.0},
        )
