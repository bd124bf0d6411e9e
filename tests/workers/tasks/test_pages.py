"""Ids of pages that ranks have, in lists of different lengths."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier
from typing import Any

import pytest

from kvrecall.domain.page_ids import PageId, make_random_id
from workers.parallel.alone import Alone
from workers.tasks.pages import PageSet, unite_ids

WAIT = 60.0


class ThreadGroup(Alone):
    """One of two ranks, whose other is a thread of this process."""

    count = 2

    def __init__(self, index: int, said: list[Any], meeting: Barrier) -> None:
        self.index = index
        self.largest = 0
        self._said = said
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        """Say a value, and wait until all have said theirs."""
        self.largest = max(self.largest, len(value) if isinstance(value, bytes) else 0)
        self._said[self.index] = value
        self._meeting.wait(WAIT)
        said = list(self._said)
        self._meeting.wait(WAIT)
        return said


@pytest.mark.parametrize("lengths", [(0, 0), (3, 0), (9_998, 9_999), (7, 50_000)])
def test_the_union_is_the_same_on_all_ranks_and_takes_exchanges_of_a_bounded_size(
    lengths: tuple[int, int],
) -> None:
    common = {make_random_id() for _ in range(2)}
    own = [common | {make_random_id() for _ in range(length)} for length in lengths]
    said, meeting = [None, None], Barrier(2)
    groups = [ThreadGroup(index, said, meeting) for index in range(2)]

    def run(group: ThreadGroup) -> tuple[int, set[PageId]]:
        steps = unite_ids(group, PageSet.of(own[group.index], group))
        count = 0
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                return count, ended.value
            count += 1

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, groups))
    assert all(one == other for one, other in pairwise(found)), "as many steps, and one list"
    assert found[0][1] == own[0] | own[1]
    assert max(group.largest for group in groups) <= 1 << 18
