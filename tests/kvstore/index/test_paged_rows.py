"""Rows in pages against the plain tensors of the same rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvstore.format.page import PageLayout
from kvstore.index.paged_rows import PagedRows

LAYOUT = PageLayout(
    n_layers=2,
    n_kv_heads=3,
    head_dim=4,
    dtype=torch.float32,
    fingerprint="m",
    page_tokens=16,
    side_layers=1,
)


def make_rows(length: int, layout: PageLayout = LAYOUT) -> Tensor:
    """Rows whose numbers tell layer, part, head and position."""
    shape = layout.rows_shape(length)
    return torch.arange(math.prod(shape)).view(shape).to(layout.dtype)


def split(rows: Tensor, start: int, stop: int, layout: PageLayout = LAYOUT) -> list[Tensor]:
    """Pages of the rows of some positions, which begin with a page; any numbers behind the last row."""
    pages = []
    for first in range(start, stop, layout.page_tokens):
        page = torch.full(layout.rows_shape(layout.page_tokens), torch.nan)
        some = rows[:, :, :, first : min(stop, first + layout.page_tokens)]
        page[:, :, :, : some.shape[3]] = some
        pages.append(page)
    return pages


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 150), max_size=6),
    data=st.data(),
)
def test_rows_are_those_that_were_appended_and_not_truncated(
    lengths: list[int], data: st.DataObject
) -> None:
    rows = make_rows(150)
    paged = PagedRows(LAYOUT)
    for length in lengths:
        paged.truncate(paged.length // 16 * 16)
        if length > paged.length:
            paged.append(split(rows, paged.length, length), length)
        else:
            paged.truncate(length)
        assert paged.length == length
        assert paged.nbytes == -(-length // 16) * 16 * LAYOUT.token_bytes
        assert paged.addresses.tolist() == [page.data_ptr() for page in paged.pages]
    length = paged.length
    for layer in range(2):
        assert torch.equal(paged.keys(layer), rows[layer, 0, :, :length])
        for part, expected in zip(paged.rows(layer), rows[layer], strict=True):
            assert torch.equal(part, expected[:, :length])
    start = data.draw(st.integers(0, length))
    some = slice(start, data.draw(st.integers(start, length)))
    assert torch.equal(paged.keys(1, some), rows[1, 0, :, some])
    assert torch.equal(paged.all_keys(some), rows[:2, 0, :, some])
    wanted = data.draw(st.lists(st.integers(-1, length - 1), min_size=3, max_size=3))
    found = paged.gather(1, torch.tensor(wanted)[:, None])
    for head, position in enumerate(wanted):
        for part, expected in zip(found, rows[1], strict=True):
            row = expected[head, position] if position >= 0 else torch.zeros(4)
            assert torch.equal(part[head, 0], row)


def test_a_selection_has_each_layers_own_rows() -> None:
    rows = make_rows(40)
    paged = PagedRows(LAYOUT)
    paged.append(split(rows, 0, 40), 40)
    selection = [torch.tensor([[3, 39]] * 3), torch.tensor([[0], [17], [33]])]
    (keys, _), (_, values) = paged.gather_selection("s", selection)
    assert torch.equal(keys, rows[0, 0][:, [3, 39]])
    assert torch.equal(values[:, 0], rows[1, 1][torch.arange(3), torch.tensor([0, 17, 33])])


def test_no_page_follows_one_that_is_not_full() -> None:
    paged = PagedRows(LAYOUT)
    paged.append(split(make_rows(20), 0, 20), 20)
    with pytest.raises(AssertionError, match="cut"):
        paged.append(split(make_rows(20), 0, 16), 36)


def test_latents_are_keys_and_values_at_once() -> None:
    layout = PageLayout(2, 1, 4, torch.float32, "m", page_tokens=16, latent=True)
    rows = make_rows(20, layout)
    paged = PagedRows(layout)
    paged.append(split(rows, 0, 20, layout), 20)
    keys, values = paged.rows(1)
    assert keys is values
    assert torch.equal(keys, rows[1, 0])
    for part in paged.gather(1, torch.tensor([[19, 2]])):
        assert torch.equal(part, rows[1, 0][:, [19, 2]])
