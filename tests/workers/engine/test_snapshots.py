"""Which stored recurrent states a session keeps."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.snapshots import choose_dropped, count_stored, find_last

POSITIONS = st.lists(st.integers(1, 50), unique=True, min_size=1, max_size=20).map(
    lambda numbers: [64 * number for number in sorted(numbers)]
)


def keep(positions: list[int], shared: int, interval: int) -> list[int]:
    """The list after what was chosen is dropped."""
    dropped = choose_dropped(positions, shared, interval)
    return [0 if i in dropped else at for i, at in enumerate(positions)]


def test_states_are_counted_up_to_the_last_that_the_tokens_have_seen() -> None:
    assert count_stored([64, 0, 192, 256], 200) == 3
    assert count_stored([64, 0, 192, 256], 191) == 1
    assert count_stored([64], 63) == 0


def test_the_last_state_within_some_tokens_is_found() -> None:
    assert find_last([64, 0, 192, 256], 255) == 192
    assert find_last([64], 10) == 0
    assert find_last([], 10) == 0


@given(positions=POSITIONS, interval=st.integers(1, 4000))
def test_the_first_and_the_last_two_stay(positions: list[int], interval: int) -> None:
    kept = keep(positions, 0, interval)
    assert kept[0] == positions[0]
    assert kept[-2:] == positions[-2:]


@given(positions=POSITIONS, interval=st.integers(1, 4000))
def test_rows_outweigh_the_states_that_stay(positions: list[int], interval: int) -> None:
    """All but the first and the last two, which may lie nearer to others."""
    kept = [at for at in keep(positions, 0, interval)[:-2] if at]
    assert all(b - a >= interval for a, b in pairwise(kept))


@given(positions=POSITIONS, data=st.data())
def test_other_sessions_states_are_never_dropped(positions: list[int], data: st.DataObject) -> None:
    shared = data.draw(st.integers(0, len(positions)))
    assert all(index >= shared for index in choose_dropped(positions, shared, 10**6))


@given(positions=POSITIONS, interval=st.integers(1, 1000))
def test_dropping_turn_by_turn_keeps_what_one_look_would(
    positions: list[int], interval: int
) -> None:
    kept: list[int] = []
    for at in positions:
        kept = keep([*kept, at], 0, interval)
    assert [at for at in kept if at] == [at for at in keep(positions, 0, interval) if at]
