"""Conversations by digest: noted with a turn's commit, found until the session is deleted."""

from collections.abc import Callable
from dataclasses import replace

from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import HistoryEntry, TurnCommit

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_ends_of_turns_are_found_by_their_digests_in_the_order_of_the_question(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    for number, digest in ((1, "a1"), (2, "")):
        commit = replace(make_turn("s", number), history=digest)
        await catalog.turns.commit(commit, 1, None)
    await catalog.turns.commit(replace(make_turn("s", 3), history="a3"), 1, None)
    found = await catalog.histories.find(["b", "a3", "a1", "c"])
    assert found == [HistoryEntry("a3", "s", 3), HistoryEntry("a1", "s", 1)]
    assert await catalog.histories.find([]) == []
    assert await catalog.histories.find([""]) == []


async def test_of_two_sessions_with_one_conversation_the_later_one_is_found(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for session in ("s", "t"):
        await catalog.sessions.create(make_session(session), b"", None)
        await catalog.turns.commit(replace(make_turn(session, 1), history="same"), 1, None)
    assert await catalog.histories.find(["same"]) == [HistoryEntry("same", "t", 1)]
