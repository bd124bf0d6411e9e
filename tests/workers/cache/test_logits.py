"""Attention with all that models do to its logits, against the formula."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.cache.logits import Logits, attend


def expect(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, logits: Logits) -> Tensor:
    """In float64, one query head after the other: query `[heads, group, t, d]`."""
    out = torch.empty(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for head in range(query.shape[0]):
        for member in range(query.shape[1]):
            product = query[head, member].double() @ key[head].double().T * logits.scale
            if logits.softcap is not None:
                product = logits.softcap * torch.tanh(product / logits.softcap)
            weights = (product + mask.double()).exp()
            total = weights.sum(-1, keepdim=True)
            if logits.sinks is not None:
                total = total + logits.sinks[head * query.shape[1] + member].double().exp()
            out[head, member] = weights / total @ value[head].double()
    return out


@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 4),
    rows=st.integers(1, 9),
    cap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_is_the_formula(
    heads: int,
    group: int,
    tokens: int,
    rows: int,
    cap: float | None,
    sinks: bool,
    masked: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, group, tokens, 4, generator=generator)
    key = torch.randn(heads, rows, 4, generator=generator)
    value = torch.randn(heads, rows, 3, generator=generator)
    mask = torch.zeros(tokens, rows)
    if masked:
        mask[:, 1:] = torch.where(torch.rand(tokens, rows - 1, generator=generator) < 0.5, 0, -30.0)
    learned = torch.randn(heads * group, generator=generator) if sinks else None
    logits = Logits(0.7, cap, learned)
    found = attend(
        query.reshape(1, heads, group * tokens, 4),
        key[None],
        value[None],
        mask.repeat(group, 1) if masked else None,
        logits,
    )
    expected = expect(query, key, value, mask, logits)
    torch.testing.assert_close(
        found.view(heads, group, tokens, 3).double(), expected, rtol=1e-4, atol=1e-5
    )
