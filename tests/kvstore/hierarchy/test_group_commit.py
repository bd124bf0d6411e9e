"""Sessions that are flushed together share one commit, and each waits for one that covers it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Semaphore

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import StoreClosedError, TierFailedError
from kvstore.hierarchy.group_commit import Group, GroupCommit, then
from tests.kvstore.page_ids import make_id


@contextmanager
def running(
    commit: Callable[[Sequence[Group]], list[bool]], kept: list[Group] | None = None
) -> Iterator[GroupCommit]:
    commits = GroupCommit(commit, (kept if kept is not None else []).append)
    try:
        yield commits
    finally:
        commits.close()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 2**30))
@settings(max_examples=50, deadline=None)
def test_every_result_is_that_of_a_commit_that_began_after_the_request(
    sizes: list[int], bits: int
) -> None:
    outcomes: list[bool] = []
    began: list[int] = []
    permits = Semaphore(0)
    submitted = 0

    def commit(groups: Sequence[Group]) -> list[bool]:
        began.append(submitted)
        permits.acquire()
        outcomes.append(bool(bits >> len(outcomes) & 1))
        return [outcomes[-1]] * len(groups)

    with running(commit) as commits:
        results = []
        for size in sizes:
            for _ in range(size):
                submitted += 1
                results.append((submitted, commits.submit([make_id(submitted)])))
            permits.release()
        for _ in results:
            permits.release()
    for number, result in results:
        covering = next(i for i, count in enumerate(began) if count >= number)
        assert result.result() in outcomes[covering:], "its own commit, or a later one"


def test_sixteen_that_wait_for_a_commit_share_the_next_one() -> None:
    sizes: list[int] = []
    first_began, may_end = Event(), Event()

    def commit(groups: Sequence[Group]) -> list[bool]:
        sizes.append(len(groups))
        first_began.set()
        may_end.wait()
        return [True] * len(groups)

    with running(commit) as commits:
        results = [commits.submit([make_id(0)])]
        first_began.wait()
        results += [commits.submit([make_id(number)]) for number in range(16)]
        may_end.set()
        assert all(result.result(timeout=30) for result in results)
    assert sizes == [1, 16]


def test_an_error_reaches_every_waiter_and_later_requests_are_served() -> None:
    began, may_end = Event(), Event()
    broken = [False, True, False]

    def commit(groups: Sequence[Group]) -> list[bool]:
        began.set()
        may_end.wait()
        if broken.pop(0):
            raise TierFailedError("the disk is gone")
        return [True] * len(groups)

    with running(commit) as commits:
        first = commits.submit([make_id(0)])
        began.wait()
        waiters = [commits.submit([make_id(number)]) for number in range(5)]
        may_end.set()
        assert first.result(timeout=30)
        for waiter in waiters:
            with pytest.raises(TierFailedError, match="the disk is gone"):
                waiter.result(timeout=30)
        assert commits.submit([make_id(1)]).result(timeout=30)


def test_each_group_has_its_own_result() -> None:
    began, may_end = Event(), Event()
    refused = make_id(9)

    def commit(groups: Sequence[Group]) -> list[bool]:
        began.set()
        may_end.wait()
        return [refused not in group for group in groups]

    with running(commit) as commits:
        commits.submit([make_id(0)])
        began.wait()
        results = [commits.submit([page]) for page in (make_id(1), refused, make_id(2))]
        may_end.set()
        assert [result.result(timeout=30) for result in results] == [True, False, True]


def test_pages_are_renewed_after_the_callers_that_wait_have_the_answer() -> None:
    began, may_end = Event(), Event()
    kept: list[Group] = []
    answered: list[bool] = []

    def commit(groups: Sequence[Group]) -> list[bool]:
        began.set()
        may_end.wait()
        answered.append(not kept)
        return [True] * len(groups)

    with running(commit, kept) as commits:
        first = commits.submit([make_id(0)])
        began.wait()
        commits.renew([make_id(1)])
        second = commits.submit([make_id(2)])
        commits.renew([make_id(1), make_id(3)])
        may_end.set()
        assert first.result(timeout=30)
        assert second.result(timeout=30)
    assert answered == [True, True]
    assert kept == [{make_id(1), make_id(3)}]


def test_closing_finishes_what_waits_and_refuses_the_rest() -> None:
    with running(lambda groups: [True] * len(groups)) as commits:
        results = [commits.submit([make_id(number)]) for number in range(5)]
    assert all(result.result() for result in results)
    with pytest.raises(StoreClosedError):
        commits.submit([make_id(1)])


def test_an_error_of_the_continuation_is_the_result() -> None:
    def fail(_: bool) -> None:
        raise TierFailedError("taken over")

    with running(lambda groups: [True] * len(groups)) as commits:
        result = then(commits.submit([make_id(0)]), fail)
    with pytest.raises(TierFailedError, match="taken over"):
        result.result(timeout=30)
