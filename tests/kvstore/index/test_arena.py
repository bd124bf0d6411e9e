"""An arena against the plain tensors of its rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.format.page import PageLayout
from kvstore.index.arena import RowArena

LAYOUT = PageLayout(n_layers=2, n_kv_heads=3, head_dim=4, dtype=torch.float32, fingerprint="m")


def rows(start: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer keys and values, whose numbers tell layer, head and position."""
    number = (
        torch.arange(start, stop).float()[None, :, None] + 1000.0 * torch.arange(3)[:, None, None]
    )
    return [(number.expand(3, -1, 4) + 1e5 * layer, -number.expand(3, -1, 4)) for layer in range(2)]


@given(lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=4))
def test_reserved_memory_holds_so_many_rows_without_more(lengths: list[int]) -> None:
    arena = RowArena(LAYOUT)
    arena.append(rows(0, 10))
    for length in lengths:
        arena.reserve(length)
    longest = max(10, *lengths)
    assert LAYOUT.token_bytes * longest <= arena.nbytes <= RowArena.bytes_for(LAYOUT, longest)
    taken = arena.nbytes
    arena.append(rows(10, longest))
    assert arena.nbytes == taken
    assert torch.equal(arena.keys(1), rows(0, longest)[1][0])


@settings(deadline=None, max_examples=40)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 1500)), max_size=8), data=st.data())
def test_an_arena_holds_what_was_appended_and_not_truncated(
    steps: list[tuple[bool, int]], data: st.DataObject
) -> None:
    arena = RowArena(LAYOUT)
    length = 0
    for appends, count in steps:
        if appends:
            arena.append(rows(length, length + count))
            length += count
        else:
            arena.truncate(count)
            length = min(length, count)
        assert arena.length == length
        assert arena.nbytes <= RowArena.bytes_for(LAYOUT, 8 * 1500)
    for layer, (keys, _) in enumerate(rows(0, length)):
        assert torch.equal(arena.keys(layer), keys)
    if length:
        wanted = data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3))
        found = arena.gather(1, torch.tensor(wanted)[:, None])
        heads = torch.arange(3)
        for part, expected in zip(found, rows(0, length)[1], strict=True):
            assert torch.equal(part[:, 0], expected[heads, torch.tensor(wanted)])


@pytest.mark.parametrize("length", [0, 1, 1000, 1025, 5000])
def test_its_memory_is_known_before_it_is_filled(length: int) -> None:
    arena = RowArena(LAYOUT)
    for start in range(0, length, 300):
        arena.append(rows(start, min(length, start + 300)))
    assert length * LAYOUT.token_bytes <= arena.nbytes <= RowArena.bytes_for(LAYOUT, length)


def test_no_row_is_read_where_none_is_wanted() -> None:
    arena = RowArena(LAYOUT)
    arena.append(rows(0, 5))
    keys, values = arena.gather(0, torch.tensor([[4, -1]] * 3))
    assert keys.shape == values.shape == (3, 2, 4)
    assert keys[2, 0].tolist() == [2004.0] * 4
    assert bool(keys.isfinite().all())


def test_rows_behind_the_end_are_seen_once_and_are_not_the_arenas() -> None:
    arena = RowArena(LAYOUT)
    arena.append(rows(0, 10))
    arena.reserve(16)
    for layer in range(2):
        keys, values = arena.extend(layer, *rows(10, 16)[layer])
        assert torch.equal(keys, rows(0, 16)[layer][0])
        assert torch.equal(values, rows(0, 16)[layer][1])
    assert arena.length == 10
    arena.append(rows(20, 23))
    assert torch.equal(arena.keys(1)[:, 10:], rows(20, 23)[1][0])
    with pytest.raises(AssertionError, match="room"):
        arena.extend(0, *rows(0, 5000)[0])
