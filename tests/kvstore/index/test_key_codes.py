"""Codes of keys: near the keys, whole numbers for every backend, and each page's once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvstore.format.buffers import empty_rows
from kvstore.format.page import PageLayout
from kvstore.index.key_codes import (
    KeyCodes,
    SharedCodes,
    code_bytes,
    code_shapes,
    encode_keys,
    encode_queries,
)

LAYOUT = PageLayout(n_layers=2, n_kv_heads=3, head_dim=8, dtype=torch.float32, fingerprint="m")


def make_page(layout: PageLayout, seed: int = 0) -> Tensor:
    rows = torch.randn(
        layout.rows_shape(layout.page_tokens), generator=torch.Generator().manual_seed(seed)
    )
    page = empty_rows(rows.shape, layout.dtype)
    page.copy_(rows)
    return page


def code(layout: PageLayout, *pages: Tensor) -> KeyCodes:
    codes = KeyCodes(layout, SharedCodes())
    codes.append([None] * len(pages), pages)
    return codes


@given(
    heads=st.integers(1, 3),
    dim=st.integers(1, 33),
    tokens=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    latent=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_codes_are_within_half_a_step_of_the_keys(
    heads: int, dim: int, tokens: int, dtype: torch.dtype, latent: bool, seed: int
) -> None:
    parts = 1 if latent else 2
    layout = PageLayout(2, heads, dim, dtype, "m", page_tokens=tokens, latent=latent)
    assert layout.parts == parts
    pages = [make_page(layout, seed), make_page(layout, seed + 1)]
    codes = code(layout, *pages)
    for layer in range(2):
        found, scales = codes.join(layer)
        keys = torch.cat([page[layer, 0] for page in pages], 1).float()
        assert found.shape == keys.shape
        assert scales.shape == keys.shape[:2]
        error = (found.float() * scales[..., None] - keys).abs()
        assert bool((error <= scales[..., None] * 0.5001).all())
        assert torch.equal(scales, keys.abs().amax(-1) / 63)


def test_products_of_codes_are_whole_numbers_that_float32_holds() -> None:
    """However they are summed: every backend computes the same logits."""
    layout = PageLayout(1, 1, 1024, torch.float32, "m")
    page = torch.ones(layout.rows_shape(layout.page_tokens))
    found, _ = code(layout, page).join(0)
    asked, _ = encode_queries(torch.full((1024,), -3.0))
    assert float(found[0, 0].float() @ asked) == -63 * 127 * 1024
    assert 63 * 127 * 1024 < 2**24


def test_keys_of_zeros_and_numbers_behind_the_rows_do_no_harm() -> None:
    page = make_page(LAYOUT)
    page[:, :, :, 0] = 0
    page[:, :, :, 1] = torch.nan
    found, scales = code(LAYOUT, page).join(0)
    assert found[:, :2].abs().max() == 0
    assert bool(scales.isfinite().all())
    assert encode_queries(torch.zeros(2, 8))[0].abs().max() == 0


def test_a_page_of_several_sessions_has_its_codes_once() -> None:
    shared = SharedCodes()
    one, other = KeyCodes(LAYOUT, shared), KeyCodes(LAYOUT, shared)
    page = make_page(LAYOUT)
    one.append([b"a" * 16, None], [page, page])
    other.append([b"a" * 16, None], [page, page])
    assert one.addresses[0] == other.addresses[0]
    assert one.addresses[1] != other.addresses[1], "it may change"
    assert one.nbytes == 2 * code_bytes(LAYOUT)
    one.truncate(0)
    changed = make_page(LAYOUT, 1)

    def get() -> Tensor:
        return shared.get(b"a" * 16, lambda: encode_keys(LAYOUT, changed))

    assert torch.equal(get(), encode_keys(LAYOUT, page)), "held"
    other.truncate(0)
    assert torch.equal(get(), encode_keys(LAYOUT, changed))


def test_pages_are_dropped_from_the_end() -> None:
    pages = [make_page(LAYOUT, seed) for seed in range(3)]
    codes = code(LAYOUT, *pages)
    before = codes.join(1)
    assert codes.joined_bytes == sum(each.nbytes for each in before)
    codes.truncate(5)
    assert len(codes) == len(codes.addresses) == 3
    codes.truncate(1)
    assert (len(codes), len(codes.addresses), codes.joined_bytes) == (1, 1, 0)
    assert torch.equal(codes.join(1)[0], before[0][:, : LAYOUT.page_tokens])
    codes.append([None], pages[2:])
    assert torch.equal(
        codes.join(1)[0][:, LAYOUT.page_tokens :], before[0][:, -LAYOUT.page_tokens :]
    )


@pytest.mark.parametrize(("tokens", "dim"), [(16, 64), (12, 6)])
def test_codes_take_a_byte_a_number_and_four_a_row(tokens: int, dim: int) -> None:
    layout = PageLayout(5, 2, dim, torch.float32, "m", page_tokens=tokens)
    scales, codes = code_shapes(layout)
    assert scales == (5, 2, 16)
    assert codes == (5, 2, 2, -(-dim // 4), 8, 4)
    assert encode_keys(layout, make_page(layout)).nbytes == code_bytes(layout)
