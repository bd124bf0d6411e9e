"""A block that attends to every stored row: the softmax over all of them, whichever are active."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from workers.cache.active_cache import EMPTY
from workers.cache.logits import Logits
from workers.cache.transfers import Transfers
from workers.prefill import stored_block
from workers.prefill.stored_block import StoredBlock, concatenate

N_HEADS, N_KV_HEADS, HEAD_DIM = 4, 2, 8


def attend_to_all(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of the last tokens to all: `[n_heads, t, head_dim]`, in float64."""
    group = N_HEADS // N_KV_HEADS
    keys, values = (each.double().repeat_interleave(group, 0) for each in (keys, values))
    logits = queries.double() @ keys.mT * scale
    tokens, length = logits.shape[1:]
    later = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1) @ values


@given(
    first=st.integers(1, 40),
    tokens=st.integers(1, 9),
    active=st.integers(0, 40),
    cells=st.sampled_from([1, 200, 2**24]),
    spread=st.sampled_from([1.0, 30.0]),
    scale=st.sampled_from([None, 0.1]),
    seed=st.integers(0, 99),
)
def test_a_block_attends_to_all_rows_whichever_are_active(
    first: int, tokens: int, active: int, cells: int, spread: float, scale: float | None, seed: int
) -> None:
    """Heads hold different rows, the block's own behind them; tiles have any size."""
    generator = torch.Generator().manual_seed(seed)
    length = first + tokens
    keys, values = torch.randn(2, N_KV_HEADS, length, HEAD_DIM, generator=generator)
    queries = spread * torch.randn(N_HEADS, tokens, HEAD_DIM, generator=generator)
    own = torch.arange(first, length)
    held = torch.stack(
        [
            torch.cat([torch.randperm(first, generator=generator)[:active], own])
            for _ in range(N_KV_HEADS)
        ]
    )
    empty = torch.full((N_KV_HEADS, 3), EMPTY)
    positions = torch.cat([held, empty], 1)
    slots = torch.cat([held, torch.zeros_like(empty)], 1)[..., None].expand(-1, -1, HEAD_DIM)
    layers = []

    def read(layer: int) -> tuple[list[Tensor], list[Tensor]]:
        layers.append(layer)
        cut = first // 2
        return [keys[:, :cut], keys[:, cut:first]], [values[:, :first]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_block, "_MASK_CELLS", cells)
        block = StoredBlock(first, concatenate(read, Transfers(torch.device("cpu"))))
        found, again = (
            block.attend(
                layer,
                queries[None],
                keys.gather(1, slots)[None],
                values.gather(1, slots)[None],
                positions.int()[None],
                Logits(HEAD_DIM**-0.5 if scale is None else scale),
            )
            for layer in (5, 6)
        )
    expected = attend_to_all(queries, keys, values, HEAD_DIM**-0.5 if scale is None else scale)
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)
    # What hides later rows is shared by all layers.
    assert torch.equal(found, again)
    assert layers == [5, 6]


def test_the_result_has_the_queries_dtype() -> None:
    rows = torch.ones(1, N_KV_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    queries = torch.ones(1, N_HEADS, 1, HEAD_DIM, dtype=torch.bfloat16)
    block = StoredBlock(
        1, concatenate(lambda _: ([rows[0]], [rows[0]]), Transfers(torch.device("cpu")))
    )
    positions = torch.ones(1, N_KV_HEADS, 1, dtype=torch.int32)
    found = block.attend(0, queries, rows, rows, positions, Logits(1.0))
    assert found.dtype == torch.bfloat16
    assert bool((found == 1).all())
