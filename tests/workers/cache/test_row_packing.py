"""Rows of windows in the form of a page's layers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.cache.row_packing import RowPacking
from workers.cache.slot_pool import KVShape


@given(
    layers=st.integers(1, 5),
    windows=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    rows=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    tokens=st.integers(1, 5),
)
def test_what_is_unpacked_is_what_was_packed(
    layers: int, windows: tuple[int, int], rows: tuple[int, int], tokens: int
) -> None:
    packing = RowPacking(
        KVShape(layers, windows[0], *windows), KVShape(3, rows[0], rows[0], rows[1])
    )
    numbers = torch.randn(layers, 2, windows[0], tokens, windows[1])
    packed = packing.pack(numbers)
    assert packed.shape == (packing.n_layers, 2, rows[0], tokens, rows[1])
    assert torch.equal(packing.unpack(packed), numbers)


@given(tokens=st.integers(2, 6), split=st.integers(1, 5))
def test_a_token_is_packed_alone(tokens: int, split: int) -> None:
    """So that pages can be cut and joined."""
    packing = RowPacking(KVShape(2, 3, 3, 5), KVShape(1, 2, 2, 4))
    numbers = torch.randn(2, 2, 3, tokens, 5)
    at = min(split, tokens - 1)
    parts = [packing.pack(part) for part in (numbers[..., :at, :], numbers[..., at:, :])]
    assert torch.equal(torch.cat(parts, 3), packing.pack(numbers))
