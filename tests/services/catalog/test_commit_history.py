"""The commit history of a session: its committed length at the end of each epoch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import StaleEpoch, UnknownSession
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.commit_points import CommitPoint
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, SessionDump, SettleCommit, TurnCommit

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


@pytest.fixture
def grow(catalog: Catalog, make_turn: MakeTurn) -> Callable[..., Any]:
    """grow(session, number, epoch, length): commit a turn after which the session is so long."""

    async def commit(session: str, number: int, epoch: int, length: int, **changes: Any) -> None:
        turn = make_turn(session, number)
        outcome = replace(turn.turn.outcome, memory=MemoryReport(length))
        turn = replace(turn, turn=replace(turn.turn, outcome=outcome), **changes)
        await catalog.turns.commit(turn, epoch, None)

    return commit


async def test_each_epoch_keeps_the_length_that_it_committed_last(
    catalog: Catalog, make_session: MakeSession, grow: Callable[..., Any]
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    assert await catalog.sessions.get_history("s") == ()
    await grow("s", 1, 1, 5)
    await grow("s", 2, 1, 9)
    for worker in ("b", "a", "a"):  # two takeovers that commit nothing
        await catalog.leases.take_over("s", worker)
    await grow("s", 3, 4, 300)
    with pytest.raises(StaleEpoch):
        await grow("s", 4, 3, 400)
    expected = (CommitPoint(1, 9), CommitPoint(4, 300))
    assert await catalog.sessions.get_history("s") == expected


async def test_tokens_without_rows_are_not_in_the_history_until_they_are_settled(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    turn = make_turn("s", 1)
    left = MemoryReport(300, unsettled=44)
    outcome = replace(turn.turn.outcome, memory=left)
    await catalog.turns.commit(replace(turn, turn=replace(turn.turn, outcome=outcome)), 1, None)
    assert await catalog.sessions.get_history("s") == (CommitPoint(1, 256),)
    await catalog.leases.take_over("s", "w")
    settled = SettleCommit(b"settled", MemoryReport(300, unsettled=12, durable=True))
    with pytest.raises(StaleEpoch):
        await catalog.turns.commit_settled("s", settled, 1)
    assert (await catalog.sessions.get("s")).memory == left
    await catalog.turns.commit_settled("s", settled, 2)
    assert await catalog.sessions.get_history("s") == (CommitPoint(1, 256), CommitPoint(2, 288))
    session = await catalog.sessions.get("s")
    assert (session.memory, session.turns) == (settled.memory, 1)
    assert await catalog.sessions.get_worker_state("s") == b"settled"
    with pytest.raises(UnknownSession):
        await catalog.turns.commit_settled("unknown", settled, 1)


async def test_epochs_are_in_numerical_order(
    catalog: Catalog, make_session: MakeSession, grow: Callable[..., Any]
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    for number in range(1, 13):
        await grow("s", number, number, number * 3)
        await catalog.leases.take_over("s", "w")
    points = await catalog.sessions.get_history("s")
    assert points == tuple(CommitPoint(number, number * 3) for number in range(1, 13))


async def test_a_fork_and_a_restored_session_were_committed_as_a_whole(
    catalog: Catalog, make_session: MakeSession, grow: Callable[..., Any]
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await grow("s", 1, 1, 5)
    await catalog.leases.take_over("s", "w")
    await grow("s", 2, 2, 20)
    parent = await catalog.sessions.get("s")
    shared = SharedPages("s", 2, (CommitPoint(1, 5), CommitPoint(2, 8)))
    child = replace(parent, id="child", epoch=1, shared=(shared,))
    await catalog.sessions.fork(ForkCommit(child, "s", 2, b""), None)
    assert await catalog.sessions.get_history("child") == (CommitPoint(1, 20),)
    assert (await catalog.sessions.get("child")).shared == (shared,)
    turns = tuple(replace(turn, session="t") for turn in await catalog.turns.get_after("s", 0, 9))
    await catalog.sessions.restore(SessionDump(replace(parent, id="t", epoch=7), b"", turns))
    assert await catalog.sessions.get_history("t") == (CommitPoint(7, 20),)


async def test_a_reference_keeps_its_history_when_the_owner_is_deleted(
    catalog: Catalog, make_session: MakeSession, grow: Callable[..., Any]
) -> None:
    for id in ("owner", "s"):
        await catalog.sessions.create(make_session(id), b"", None)
    await grow("owner", 1, 1, 8)
    shared = SharedPages("owner", 1, (CommitPoint(1, 8),))
    assert await catalog.page_refs.reserve("s", SharedPages("owner", 2))
    await grow("s", 1, 1, 9, shared=(shared,))
    await catalog.sessions.delete("owner", None)
    assert (await catalog.sessions.get("s")).shared == (shared,)


async def test_a_new_session_of_a_deleted_one_s_id_has_a_history_of_its_own(
    catalog: Catalog, make_session: MakeSession, grow: Callable[..., Any]
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    await grow("s", 1, 1, 5)
    await catalog.sessions.delete("s", None)
    with pytest.raises(UnknownSession):
        await catalog.sessions.get_history("s")
    await catalog.sessions.create(make_session("s"), b"", None)
    assert await catalog.sessions.get_history("s") == ()
