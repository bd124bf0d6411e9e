"""The tree of page ids follows the sessions of a Redis catalog, whatever breaks off in between."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.domain.errors import CatalogError, QuotaExceeded, StaleEpoch
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.sessions.session import Session
from kvrecall_server.app.redis import redis_client
from services.catalog.quota import TenantLimits
from services.catalog.records import ForkCommit, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.deletion import SessionDeletion
from services.catalog.redis.indexes.page_tree import RedisPageTree
from services.catalog.redis.slot.slot import SessionSlots
from tests.services.catalog.page_chains import Tree, check_tree, name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]


async def read_tree(client: Any, keys: Keys) -> tuple[Tree, set[bytes], dict[str, list[bytes]]]:
    """The pages, the dead ones, and what each session ends with."""
    pages, dead, ends = keys.page_tree
    tree = {}
    for id, value in (await client.hgetall(pages)).items():
        refs, _, before = value.partition(b" ")
        tree[id] = (before or None, int(refs))
    found = {}
    for session, entry in (await client.hgetall(ends)).items():
        if session:
            at = entry.index(b" ") + 1
            found[session.decode()] = [entry[i : i + 16] for i in range(at, len(entry), 32)]
    return tree, set(await client.zrange(dead, 0, -1)), found


class Gateway:
    """Commits and deletions of sessions, of which each may break off after each of its steps."""

    def __init__(self, client: Any, keys: Keys) -> None:
        redis = CatalogRedis(client, 5.0, 5.0)
        self._client = client
        self._keys = keys
        self.tree = RedisPageTree(redis, keys, SessionSlots(redis, keys))
        self.chains: dict[str, tuple[bytes, ...]] = {}
        self.ever: dict[bytes, tuple[bytes, ...]] = {}

    async def commit(self, session: str, chain: tuple[bytes, ...], end: str) -> None:
        """Commit a session with some pages: up to the step that `end` names."""
        self.ever |= {page: chain[: at + 1] for at, page in enumerate(chain)}
        with suppress(CatalogError, StaleEpoch):
            async with self.tree.proposed(session, join_ids(chain)) as proposal:
                if end == "proposed":
                    raise CatalogError("the connection was lost")
                if end == "refused":
                    raise StaleEpoch("another gateway came")
                self.chains[session] = chain
                await self._client.set(self._keys.get_meta(session), 1)
            if end != "committed":
                await self.tree.settle(session, proposal)

    async def delete(self, session: str, end: str) -> None:
        """Delete a session: in the tree too unless that breaks off."""
        self.chains.pop(session, None)
        await self._client.delete(self._keys.get_meta(session))
        if end != "committed":
            await self.tree.drop(session)

    async def finish(self) -> None:
        """Do what repairs all that broke off: a commit of each session, and a look at the others."""
        for session, chain in self.chains.items():
            await self.commit(session, chain, "")
        await self.tree.drop_abandoned(-1.0)

    async def check(self, *, exact: bool) -> None:
        """Check that no session lacks a page, and that each page is some session's or dead."""
        tree, dead, ends = await read_tree(self._client, self._keys)
        check_tree(tree, [self.ever[end] for each in ends.values() for end in each])
        assert {page for chain in self.chains.values() for page in chain} <= tree.keys()
        assert dead == self.ever.keys() - tree.keys()
        if exact:
            expected = {name: [chain[-1]] for name, chain in self.chains.items() if chain}
            assert ends == expected


# A session, how many of its pages it keeps, those that follow (None: it is deleted), and where that breaks off.
STEP = st.tuples(
    st.sampled_from("abc"),
    st.integers(0, 5),
    st.none() | st.lists(st.integers(0, 1), max_size=4),
    st.sampled_from(["", "", "proposed", "refused", "committed"]),
)


@given(st.lists(STEP, max_size=16))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_session_ever_lacks_a_page_and_what_broke_off_is_repaired(
    redis_url: str, steps: list[tuple[str, int, Any, str]]
) -> None:
    tokens: dict[str, list[int]] = {}

    async def take_steps() -> None:
        client = redis_client(redis_url)
        gateway = Gateway(client, Keys(uuid4().hex))
        for session, kept, more, end in steps:
            if more is None:
                tokens.pop(session, None)
                await gateway.delete(session, end)
            else:
                said = [*tokens.get(session, [])[:kept], *more]
                await gateway.commit(session, name_chain(said), end)
                if gateway.chains.get(session) == name_chain(said):
                    tokens[session] = said
            await gateway.check(exact=False)
        await gateway.finish()
        await gateway.check(exact=True)
        await client.aclose()

    asyncio.run(take_steps())


async def test_a_proposal_that_comes_late_takes_no_page_from_another_writer(
    redis_url: str,
) -> None:
    client = redis_client(redis_url)
    gateway = Gateway(client, Keys(uuid4().hex))
    ours, theirs, last = name_chain([0, 1]), name_chain([0, 2, 2]), name_chain([0, 2, 3])
    await gateway.commit("s", name_chain([0]), "")
    async with gateway.tree.proposed("s", join_ids(ours)) as late:
        await gateway.commit("s", theirs, "")
    gateway.ever |= {page: ours[: at + 1] for at, page in enumerate(ours)}
    await gateway.commit("s", ours, "proposed")
    await gateway.check(exact=False)
    await gateway.tree.settle("s", late)
    await gateway.check(exact=False)
    await gateway.commit("s", last, "")
    await gateway.check(exact=True)
    await client.aclose()


async def test_pages_of_a_session_that_was_never_created_are_dead_once_they_are_old(
    open_catalog: Open, redis_url: str
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    client = redis_client(redis_url)
    chain = name_chain([0, 0])
    await Gateway(client, Keys(namespace)).commit("s", chain, "proposed")
    await catalog.pages.drop_abandoned(3600.0)
    assert await catalog.pages.get_dead(9) == []
    await catalog.pages.drop_abandoned(-1.0)
    assert set(await catalog.pages.get_dead(9)) == set(chain)
    await client.aclose()


async def test_a_deletion_that_broke_off_is_finished_by_a_look_for_dead_pages(
    open_catalog: Open,
    redis_url: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s", tenant="a b"), b"", None)
    chain = name_chain([0, 0])
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=join_ids(chain)), 1, None)

    async def fail(self: SessionDeletion, note: str) -> None:
        raise CatalogError("the connection was lost")

    with monkeypatch.context() as patch:
        patch.setattr(SessionDeletion, "_finish", fail)
        await catalog.sessions.delete("s", None)
    assert await catalog.pages.count_dead() == 0
    assert set(await catalog.pages.get_dead(9)) == set(chain)
    client = redis_client(redis_url)
    assert not await client.exists(Keys(namespace).deleted)
    assert await client.zcard(Keys(namespace).get_sessions("a b")) == 0
    await client.aclose()


async def test_a_fork_over_its_tenant_s_quota_has_no_pages(
    open_catalog: Open, redis_url: str, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    catalog = await open_catalog(redis_url)
    await catalog.sessions.create(make_session("s"), b"", None)
    await catalog.turns.commit(make_turn("s", 1), 1, None)
    child = replace(await catalog.sessions.get("s"), id="child")
    chain = name_chain([0, 1])
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.fork(
            ForkCommit(child, "s", 1, b"", join_ids(chain)), None, TenantLimits(sessions=1)
        )
    assert await catalog.pages.find_live(chain) == []
