"""Attention over gathered rows is the softmax over exactly these."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall.domain.settings.prefill import Prefill
from tests.workers.prefill.blocks import build_block, dense_output
from workers.prefill.attention import attend, find_places
from workers.prefill.block_rows import TILE, BlockRows
from workers.prefill.lines import Lines, choose_lines

SPARSE = Prefill(sparse="on", alpha=0.9, sample=64, band=16, max_density=1.0)


def draw_lines(rows: BlockRows, seed: int, share: float) -> Lines:
    """Random lines: some columns of rows that are there, and some distances."""
    random = torch.Generator().manual_seed(seed)
    heads, n = rows.queries.shape[0], rows.keys.shape[1]
    before = (rows.positions < rows.first).repeat_interleave(rows.group, 0)
    columns = (torch.rand(heads, n, generator=random) < share) & before
    offsets = torch.rand(heads, rows.end, generator=random) < share / 50
    return Lines(columns, offsets, torch.zeros(heads, dtype=torch.bool), torch.ones(heads))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 999),
    group=st.sampled_from([1, 2, 3, 7]),
    kv_heads=st.integers(1, 3),
    tokens=st.sampled_from([2, 63, 64, 65, 200, 580]),
    kept=st.sampled_from([1.0, 0.3]),
    uneven=st.booleans(),
    share=st.sampled_from([0.0, 0.05, 0.5]),
)
def test_it_is_the_softmax_over_its_cells(
    seed: int, group: int, kv_heads: int, tokens: int, kept: float, uneven: bool, share: float
) -> None:
    rows = build_block(
        seed, group=group, kv_heads=kv_heads, tokens=tokens, kept=kept, uneven=uneven
    )
    lines = draw_lines(rows, seed, share)
    places = find_places(rows, lines, SPARSE)
    cells = places.wanted.repeat_interleave(TILE, 1)[:, :tokens]
    torch.testing.assert_close(
        attend(rows, places), dense_output(rows, cells), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_the_cells_of_every_line_are_computed_and_no_tile_sees_more_rows(
    group: int, kept: float
) -> None:
    rows = build_block(1, group=group, tokens=150, kept=kept, uneven=True)
    lines = draw_lines(rows, 1, 0.1)
    places = find_places(rows, lines, SPARSE)
    assert not bool(places.alike.any())
    wanted = places.wanted
    columns = lines.columns.view(2, group, -1).any(1) | rows.always(SPARSE.sinks)
    offsets = lines.offsets.view(2, group, -1).any(1)
    offsets[:, : SPARSE.band] = True
    for head in range(2):
        for tile in range(wanted.shape[1]):
            queries = range(rows.first + TILE * tile, min(rows.end, rows.first + TILE * (tile + 1)))
            for index, position in enumerate(rows.positions[head].tolist()):
                visible = position <= queries[-1]
                on_slash = any(bool(offsets[head, q - position]) for q in queries if q >= position)
                expected = visible and (bool(columns[head, index]) or on_slash)
                assert bool(wanted[head, tile, index]) == expected


@pytest.mark.parametrize("cache", [{}, {"kept": 0.4}, {"kept": 0.4, "uneven": True}])
def test_all_weight_of_all_queries_gives_exact_attention(cache: dict[str, object]) -> None:
    rows = build_block(8, tokens=128, **cache)  # type: ignore[arg-type]
    how = replace(SPARSE, alpha=1.0, sample=128, band=0)
    lines = choose_lines(rows, how, torch.Generator().manual_seed(0))
    assert lines is not None
    assert not bool(lines.exact.any())
    out = attend(rows, find_places(rows, lines, how))
    torch.testing.assert_close(out, dense_output(rows), atol=1e-5, rtol=0)


def test_tiles_that_want_about_the_same_rows_attend_to_their_union() -> None:
    rows = build_block(3, old=2000, tokens=150)
    lines = draw_lines(rows, 3, 0.0)
    lines.columns[:2, :900] = True
    lines.offsets[:2, 1200] = True
    places = find_places(rows, lines, SPARSE)
    assert places.alike.tolist() == [[True], [False]]
    assert torch.equal(places.wanted[0, 0], places.wanted[0, 2])
    assert bool(places.wanted[0, 0, 1900 - 1200 : 2149 - 1200].all())
    out = attend(rows, places)
    cells = places.wanted.repeat_interleave(TILE, 1)[:, : rows.tokens]
    torch.testing.assert_close(out, dense_output(rows, cells), atol=1e-5, rtol=1e-4)


def test_a_kv_head_whose_tiles_take_too_many_rows_is_computed_whole() -> None:
    rows = build_block(9, kv_heads=2, group=2, old=800, tokens=128)
    lines = draw_lines(rows, 9, 0.0)
    lines.columns[0, :600] = True  # one query head is enough
    how = replace(SPARSE, max_density=0.5)
    places = find_places(rows, lines, how)
    assert places.exact.tolist() == [True, False]
    assert float(places.density[0]) == 1.0
    assert float(places.density[1]) < 0.5
    out = attend(rows, places)
    torch.testing.assert_close(out[:2], dense_output(rows)[:2], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(out[2:], dense_output(rows)[2:], atol=1e-3)
