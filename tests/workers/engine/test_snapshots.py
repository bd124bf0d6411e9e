"""Which stored recurrent states a session keeps."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.snapshots import choose_dropped, find_last

POSITIONS = st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=20).map(
    lambda numbers: [64 * number for number in sorted(numbers)]
)


def keep(positions: list[int], interval: int) -> list[int]:
    """The list without what was chosen to be dropped."""
    dropped = choose_dropped(positions, interval)
    return [at for i, at in enumerate(positions) if i not in dropped]


def test_the_last_state_within_some_tokens_is_found() -> None:
    assert find_last([64, 192, 256], 255) == 192
    assert find_last([64], 10) == 0
    assert find_last([], 10) == 0


@given(positions=POSITIONS, interval=st.integers(1, 4000))
def test_the_first_and_the_last_two_stay(positions: list[int], interval: int) -> None:
    kept = keep(positions, interval)
    assert kept[0] == positions[0]
    assert kept[-2:] == positions[-2:]


@given(positions=POSITIONS, interval=st.integers(1, 4000))
def test_rows_outweigh_the_states_that_stay(positions: list[int], interval: int) -> None:
    """All but the first and the last two, which may lie nearer to others."""
    kept = keep(positions, interval)[:-2]
    assert all(b - a >= interval for a, b in pairwise(kept))


@given(positions=POSITIONS, data=st.data())
def test_the_anchor_stays(positions: list[int], data: st.DataObject) -> None:
    anchor = data.draw(st.sampled_from(positions))
    dropped = choose_dropped(positions, 10**6, anchor)
    assert positions.index(anchor) not in dropped
    assert dropped == sorted(dropped, reverse=True)


@given(positions=POSITIONS, interval=st.integers(1, 1000))
def test_dropping_turn_by_turn_keeps_what_one_look_would(
    positions: list[int], interval: int
) -> None:
    kept: list[int] = []
    for at in positions:
        kept = keep([*kept, at], interval)
    assert kept == keep(positions, interval)
