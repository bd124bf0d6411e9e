"""The protocol of the programs: what of a session is in the cache already."""

import pytest

from benchmarks.peers.programs.lines import common_prefix


@pytest.mark.parametrize(
    ("held", "wanted", "same"),
    [
        ([], [1, 2], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 9], [1, 2, 3, 4], 2),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3, 4], [1, 2], 1),
    ],
)
def test_at_least_one_token_is_computed_again(
    held: list[int], wanted: list[int], same: int
) -> None:
    assert common_prefix(held, wanted) == same
