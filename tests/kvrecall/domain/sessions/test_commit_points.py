"""Commit histories: cut to a reference, and limited without ever making more rows believed."""

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from kvrecall.domain.sessions.commit_points import (
    MAX_COMMIT_POINTS,
    CommitPoint,
    cut_points,
    limit_points,
)

GROWTH = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 40)), max_size=400)


def build(growth: list[tuple[int, int]]) -> list[CommitPoint]:
    points, epoch, length = [], 0, 0
    for epochs, tokens in growth:
        epoch, length = epoch + epochs, length + tokens
        points.append(CommitPoint(epoch, length))
    return points


def committed(points: tuple[CommitPoint, ...] | list[CommitPoint], epoch: int) -> int:
    index = bisect_right([point.epoch for point in points], epoch)
    return points[index - 1].length if index else 0


@given(GROWTH)
def test_a_limited_history_believes_no_more_and_what_is_written_now_as_before(
    growth: list[tuple[int, int]],
) -> None:
    points = build(growth)
    limited = limit_points(points)
    assert len(limited) <= MAX_COMMIT_POINTS
    assert limited[-1:] == tuple(points[-1:])
    for point in points:
        assert committed(limited, point.epoch) <= point.length


def test_the_points_that_added_least_are_left_out() -> None:
    small = [CommitPoint(number, number) for number in range(1, 101)]
    large = [CommitPoint(number, 1000 * number) for number in range(101, 101 + MAX_COMMIT_POINTS)]
    assert limit_points([*small, *large]) == tuple(large)


@given(GROWTH, st.integers(0, 2000))
def test_a_cut_history_is_the_same_for_the_first_tokens(
    growth: list[tuple[int, int]], tokens: int
) -> None:
    points = build(growth[:MAX_COMMIT_POINTS])
    cut = cut_points(points, tokens)
    for epoch in range(3 * len(points) + 1):
        assert min(committed(cut, epoch), tokens) == min(committed(points, epoch), tokens)
