"""The tree of page ids follows the sessions of a Redis catalog."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall.domain.page_ids import join_ids, split_ids
from kvrecall.domain.sessions.session import Session
from kvrecall_server.app.redis import redis_client
from services.catalog.page_tree import Run
from services.catalog.records import ForkCommit, TurnCommit
from services.catalog.redis.catalog import RedisCatalog
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.indexes.page_runs import RedisPageRuns
from services.catalog.redis.slot.slot import SessionSlots
from tests.services.catalog.page_chains import check_runs, name_chain

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]
Open = Callable[..., Awaitable[RedisCatalog]]


async def read_tree(
    client: Any, keys: Keys, tenant: str
) -> tuple[dict[int, Run], dict[str, int | None]]:
    """The runs of a tenant, and the run that each of its sessions ends with."""
    *names, behind = keys.get_page_runs(tenant)
    runs, pages, first, ends = [await client.hgetall(name) for name in names]
    found = {}
    for id, value in runs.items():
        if id != b"last":
            parent, refs = value.decode().split(" ")
            found[int(id)] = Run(
                int(id), int(parent) if parent else None, int(refs), split_ids(pages[id])
            )
    links = {f"r{run.parent}:{run.id}" for run in found.values() if run.parent is not None}
    links |= {f"s{end.split()[0].decode()}:{name.decode()}" for name, end in ends.items()}
    assert {link.decode() for link in await client.zrange(behind, 0, -1)} == links
    assert {id.decode() for id in pages} == {str(id) for id in found}
    assert first == {run.pages[0]: str(run.id).encode() for run in found.values()}
    return found, {name.decode(): int(end.split()[0]) for name, end in ends.items()}


@pytest.mark.parametrize("url", ["redis_url", "redis_cluster_url"])
async def test_runs_follow_commits_forks_and_deletions(
    request: pytest.FixtureRequest,
    url: str,
    open_catalog: Open,
    make_session: MakeSession,
    make_turn: MakeTurn,
) -> None:
    namespace, address = uuid4().hex, request.getfixturevalue(url)
    catalog = await open_catalog(address, namespace)
    client = redis_client(address)
    chains: dict[str, tuple[bytes, ...]] = {}

    async def check() -> None:
        runs, leaves = await read_tree(client, Keys(namespace), "")
        check_runs(runs, leaves, chains)

    async def commit(session: str, number: int, *tokens: int) -> None:
        chains[session] = name_chain(tokens)
        turn = replace(make_turn(session, number), page_ids=join_ids(chains[session]))
        await catalog.turns.commit(turn, 1, None)
        await check()

    for session in "st":
        await catalog.sessions.create(make_session(session), b"", None)
    await commit("s", 1, 0, 0, 0)
    await commit("t", 1, 0, 0, 1)
    await commit("s", 2, 0, 0, 0, 1, 1)
    child = replace(await catalog.sessions.get("s"), id="child")
    chains["child"] = chains["s"][:2]
    await catalog.sessions.fork(ForkCommit(child, "s", 1, b"", join_ids(chains["child"])), None)
    await check()
    for session in ("s", "t", "child"):
        await catalog.sessions.delete(session, None)
        del chains[session]
        await check()
    assert not any([await client.exists(name) for name in Keys(namespace).get_page_runs("")])
    await client.aclose()


async def test_a_session_that_a_deletion_left_behind_is_forgotten_by_a_look_up(
    open_catalog: Open, redis_url: str, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    namespace = uuid4().hex
    catalog = await open_catalog(redis_url, namespace)
    await catalog.sessions.create(make_session("s"), b"", None)
    page_ids = join_ids(name_chain([0, 0]))
    await catalog.turns.commit(replace(make_turn("s", 1), page_ids=page_ids), 1, None)
    client = redis_client(redis_url)
    names = Keys(namespace).get_page_runs("")
    tree = {name: await client.dump(name) for name in names}
    await catalog.sessions.delete("s", None)
    for name, value in tree.items():
        await client.restore(name, 0, value or b"")
    found = await catalog.page_refs.find_prefix("", page_ids)
    assert (found.pages, found.sessions) == (0, ())
    assert not any([await client.exists(name) for name in names])
    await client.aclose()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.lists(st.integers(0, 1), max_size=5)), max_size=20
    )
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_sessions_have_the_runs_of_their_pages(
    redis_url: str, steps: list[tuple[str, list[int]]]
) -> None:
    """Each step adds pages to a session, or deletes one if it adds none."""
    keys = Keys(uuid4().hex)
    tokens: dict[str, list[int]] = {}

    async def take_steps() -> None:
        client = redis_client(redis_url)
        redis = CatalogRedis(client, 5.0, 5.0)
        runs = RedisPageRuns(redis, keys, SessionSlots(redis, keys))
        for session, more in steps:
            if more:
                tokens[session] = [*tokens.get(session, []), *more]
                ids = join_ids(name_chain(tokens[session]))
                await runs.extend(session, "one", ids)
                await runs.extend(session, "one", ids[:16])  # one that came late
            else:
                tokens.pop(session, None)
                await runs.drop(session, "one")
            found, leaves = await read_tree(client, keys, "one")
            check_runs(found, leaves, {name: name_chain(each) for name, each in tokens.items()})
        await redis.close()

    asyncio.run(take_steps())
