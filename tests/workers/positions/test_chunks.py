"""Chunks: every row is seen where the definition says, whatever the window and the size."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.positions.chunks import Chunks, choose_size

SIZES = st.integers(1, 40).flatmap(
    lambda size: st.builds(Chunks, st.integers(3 * size, 5 * size + 3), st.just(size))
)


def seen_by_definition(chunks: Chunks, row: int, first: int) -> int:
    """Where a pass whose first token is at `first`, behind the window, sees the row at `row`."""
    window, size = chunks.window, chunks.size
    chunk, own = (row - window) // size, (first - window) // size
    offset = (row - window) % size
    if chunk >= own:
        return 2 * size + row - (window + own * size)
    return size + offset if chunk == own - 1 else offset


def shift_of(chunks: Chunks, row: int, first: int) -> int:
    segments = chunks.find_segments(first)
    return next(each.shift for each in reversed(segments) if each.start <= row)


@given(SIZES, st.integers(0, 400))
def test_a_row_is_seen_where_the_definition_says(chunks: Chunks, beyond: int) -> None:
    first = chunks.window + beyond
    for row in range(first + 1):
        found = chunks.place(row) + shift_of(chunks, row, first)
        assert found == seen_by_definition(chunks, row, first)


@given(SIZES, st.integers(0, 400))
def test_rows_of_this_chunk_and_the_one_before_are_at_their_true_distances(
    chunks: Chunks, beyond: int
) -> None:
    first = chunks.window + beyond
    near = chunks.find_start(first) - chunks.size
    for row in range(near, first + 1):
        distance = chunks.place(first) - (chunks.place(row) + shift_of(chunks, row, first))
        assert distance == first - row
    for row in range(near):
        distance = chunks.place(first) - (chunks.place(row) + shift_of(chunks, row, first))
        assert 0 < distance < 3 * chunks.size


@given(SIZES, st.integers(0, 400))
def test_segments_begin_at_the_first_row_and_end_with_one_that_is_not_turned(
    chunks: Chunks, beyond: int
) -> None:
    segments = chunks.find_segments(chunks.window + beyond)
    starts = [each.start for each in segments]
    assert starts == sorted(set(starts))
    assert (starts[0], segments[-1].shift) == (0, 0)


@given(SIZES, st.integers(0, 300), st.integers(1, 90))
def test_no_block_between_cuts_has_tokens_of_two_chunks(
    chunks: Chunks, first: int, tokens: int
) -> None:
    bounds = [0, *chunks.find_cuts(first, tokens), tokens]
    assert bounds == sorted(set(bounds))
    for begin, end in pairwise(bounds):
        if first + begin >= chunks.window:
            assert chunks.find_start(first + begin) == chunks.find_start(first + end - 1)
        else:
            assert first + end <= chunks.window


def test_up_to_the_window_places_are_true_positions() -> None:
    chunks = Chunks(96, 32)
    assert [chunks.place(at) for at in range(96)] == list(range(96))
    assert [chunks.place(at) for at in (96, 127, 128, 10_000_000)] == [64, 95, 64, 64]


@pytest.mark.parametrize(
    ("window", "size"),
    [(16_384, 2560), (8192, 1280), (1000, 128), (500, 64), (192, 64), (191, None)],
)
def test_about_a_sixth_of_the_window_is_chosen(window: int, size: int | None) -> None:
    assert choose_size(window, 64) == size


def test_chunks_that_do_not_fit_the_window_three_times_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit three times into a window of 100"):
        Chunks(100, 34)
