"""Pages are some session's, dead, or unknown."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import StaleEpoch, UnknownSession
from kvrecall.domain.page_ids import join_ids, make_random_id
from kvrecall.domain.reports import MemoryReport
from kvrecall.domain.sessions.session import Session
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, SessionDump, SettleCommit, TurnCommit
from tests.services.catalog.page_chains import name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
STRANGE = make_random_id()


class Talk:
    """Sessions with pages of one token each."""

    def __init__(self, catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> None:
        self.catalog = catalog
        self._make_session = make_session
        self._make_turn = make_turn
        self._turns: dict[str, int] = {}

    async def say(self, session: str, *tokens: int, epoch: int = 1) -> None:
        """Commit a turn after which the session has these pages."""
        if session not in self._turns:
            tenant = session.upper()
            await self.catalog.sessions.create(
                self._make_session(session, tenant=tenant), b"", None
            )
        number = self._turns.get(session, 0) + 1
        page_ids = join_ids(name_chain(tokens))
        turn = replace(self._make_turn(session, number), page_ids=page_ids)
        await self.catalog.turns.commit(turn, epoch, None)
        self._turns[session] = number

    async def fork(self, parent: str, child: str, *tokens: int) -> None:
        """Fork at the last turn, with these pages."""
        begins = replace(await self.catalog.sessions.get(parent), id=child)
        page_ids = join_ids(name_chain(tokens))
        commit = ForkCommit(begins, parent, begins.turns, b"", page_ids)
        await self.catalog.sessions.fork(commit, None)

    async def delete(self, *sessions: str) -> None:
        """Delete sessions."""
        for session in sessions:
            await self.catalog.sessions.delete(session, None)

    async def check(self, live: list[list[int]], dead: list[list[int]]) -> None:
        """Check which pages are some session's and which are dead; each is named by its tokens."""
        expected = {name_chain(tokens)[-1] for tokens in live}
        buried = {name_chain(tokens)[-1] for tokens in dead}
        asked = [*expected, STRANGE, *buried]
        assert set(await self.catalog.pages.find_live(asked)) == expected
        assert set(await self.catalog.pages.get_dead(99)) == buried
        assert await self.catalog.pages.count_dead() == len(buried)
        assert await self.catalog.pages.find_unknown(asked) == [STRANGE]


@pytest.fixture
def talk(catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> Talk:
    return Talk(catalog, make_session, make_turn)


async def test_pages_are_dead_once_the_last_session_that_has_them_is_deleted(talk: Talk) -> None:
    await talk.say("s", 0, 0, 0)
    await talk.say("t", 0, 0, 1)
    await talk.say("s", 0, 0, 0, 1)
    await talk.check(live=[[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0, 1]], dead=[])
    await talk.delete("s")
    await talk.check(live=[[0], [0, 0], [0, 0, 1]], dead=[[0, 0, 0], [0, 0, 0, 1]])
    await talk.delete("t")
    await talk.check(live=[], dead=[[0], [0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0, 1]])


async def test_a_session_that_is_rewritten_leaves_the_pages_that_it_had(talk: Talk) -> None:
    await talk.say("s", 0, 1, 1)
    await talk.say("s", 0, 2)
    await talk.check(live=[[0], [0, 2]], dead=[[0, 1], [0, 1, 1]])
    await talk.say("s", 3)
    await talk.check(live=[[3]], dead=[[0], [0, 1], [0, 1, 1], [0, 2]])
    await talk.say("s")
    await talk.check(live=[], dead=[[3], [0], [0, 1], [0, 1, 1], [0, 2]])


async def test_a_fork_has_its_pages_whatever_becomes_of_its_parent(talk: Talk) -> None:
    await talk.say("s", 0, 0, 0)
    await talk.fork("s", "child", 0, 0)
    await talk.delete("s")
    await talk.check(live=[[0], [0, 0]], dead=[[0, 0, 0]])
    await talk.delete("child")
    await talk.check(live=[], dead=[[0], [0, 0], [0, 0, 0]])


async def test_a_dead_page_that_a_session_has_again_is_alive(talk: Talk) -> None:
    await talk.say("s", 0, 0)
    await talk.delete("s")
    await talk.say("t", 0)
    await talk.check(live=[[0]], dead=[[0, 0]])
    dump = SessionDump(replace(await talk.catalog.sessions.get("t"), id="u"), b"", ())
    await talk.catalog.sessions.restore(replace(dump, page_ids=join_ids(name_chain([0, 0]))))
    await talk.check(live=[[0], [0, 0]], dead=[])


async def test_what_is_settled_between_turns_changes_pages_too(talk: Talk) -> None:
    await talk.say("s", 0, 1)
    settled = SettleCommit(b"settled", MemoryReport(), join_ids(name_chain([0, 2, 2])))
    await talk.catalog.turns.commit_settled("s", settled, 1)
    await talk.check(live=[[0], [0, 2], [0, 2, 2]], dead=[[0, 1]])


async def test_a_commit_that_is_refused_gives_its_session_no_page(talk: Talk) -> None:
    await talk.say("s", 0, 1)
    with pytest.raises(StaleEpoch):
        await talk.say("s", 0, 2, epoch=9)
    await talk.say("t", 5)
    await talk.delete("t")
    with pytest.raises(UnknownSession):
        await talk.say("t", 5, 6)
    live = [*name_chain([0, 1])]
    refused = [*name_chain([0, 2]), *name_chain([5, 6])]
    assert await talk.catalog.pages.find_live([*live, *refused[1:]]) == live


async def test_dead_pages_are_returned_oldest_first_until_their_deletion_is_confirmed(
    talk: Talk,
) -> None:
    for tokens in ([0], [1], [2]):
        await talk.say(f"s{tokens[0]}", *tokens)
    await talk.delete("s1", "s0")
    pages = talk.catalog.pages
    assert len(await pages.get_dead(1)) == 1
    await pages.confirm_deleted([*name_chain([1]), *name_chain([2]), STRANGE])
    await talk.check(live=[[2]], dead=[[0]])
    await pages.confirm_deleted([])
    assert await pages.find_unknown(name_chain([1])) == list(name_chain([1]))


async def test_many_pages_are_looked_up_at_once(talk: Talk) -> None:
    await talk.say("s", *range(200))
    known = name_chain(range(200))
    strange = [make_random_id() for _ in range(2500)]
    assert await talk.catalog.pages.find_unknown([*strange, *known]) == strange
    assert sorted(await talk.catalog.pages.find_live([*strange, *known])) == sorted(known)
    assert await talk.catalog.pages.find_live([]) == []
    assert await talk.catalog.pages.find_unknown([]) == []
