"""References to shared pages: retained while referenced, orphaned afterwards."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.page_ids import join_ids
from kvrecall.domain.sessions.session import Session, SharedPages
from services.catalog.base import Catalog
from services.catalog.page_tree import SESSIONS_FOUND
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    OrphanedPages,
    TurnCommit,
)
from services.catalog.redis import deletion
from services.catalog.sqlite import page_refs
from tests.services.catalog.page_chains import name_chain

MakeSession = Callable[..., Session]
Fork = Callable[..., Awaitable[None]]
MakeTurn = Callable[..., TurnCommit]


@pytest.fixture
def fork(catalog: Catalog, make_turn: MakeTurn) -> Fork:
    """fork(parent, child, *shared): a fork that references pages, given as owner and number."""

    async def make(parent: str, child: str, *shared: tuple[str, int]) -> None:
        start = await catalog.sessions.get(parent)
        refs = tuple(SharedPages(*each) for each in shared)
        await catalog.sessions.fork(
            ForkCommit(replace(start, id=child, shared=refs), parent, start.turns, b"child"),
            None,
        )

    return make


@pytest.fixture
async def parent(catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> str:
    """A session with two turns."""
    await catalog.sessions.create(make_session("parent"), b"", None)
    for number in (1, 2):
        await catalog.turns.commit(make_turn("parent", number), 1, None)
    return "parent"


async def delete_and_confirm(catalog: Catalog, session: str) -> list[OrphanedPages]:
    """Delete a session, and confirm that the workers have deleted its orphaned pages."""
    orphaned = await catalog.sessions.delete(session, None)
    for each in orphaned:
        await catalog.page_refs.confirm_deleted(each)
    return orphaned


async def test_orphaned_pages_are_returned_until_their_deletion_is_confirmed(
    catalog: Catalog, parent: str, make_session: MakeSession, fork: Fork
) -> None:
    await fork(parent, "child", (parent, 5))
    assert await catalog.page_refs.get_orphaned() == []
    assert await catalog.sessions.delete(parent, None) == [OrphanedPages(parent, 5)]
    assert await catalog.page_refs.get_orphaned() == [OrphanedPages(parent, 5)]
    assert await catalog.sessions.delete("child", None) == [
        OrphanedPages("child", 0),
        OrphanedPages(parent, 0),
    ]
    await catalog.page_refs.confirm_deleted(
        OrphanedPages(parent, 5)
    )  # late: more pages are orphaned since
    assert sorted(await catalog.page_refs.get_orphaned(), key=str) == [
        OrphanedPages("child", 0),
        OrphanedPages(parent, 0),
    ]
    await catalog.sessions.create(make_session("other"), b"", None)
    orphaned = await catalog.sessions.delete("other", None)
    assert (orphaned[0], set(orphaned[1:])) == (
        OrphanedPages("other", 0),
        {OrphanedPages("child", 0), OrphanedPages(parent, 0)},
    )
    for each in orphaned:
        await catalog.page_refs.confirm_deleted(each)
    assert await catalog.page_refs.get_orphaned() == []


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every creation that is not committed for abandoned."""
    for module in (deletion, page_refs):
        monkeypatch.setattr(module, "CREATION_SECONDS", 0.0)


async def test_a_session_in_creation_keeps_its_pages(
    catalog: Catalog, parent: str, fork: Fork, request: pytest.FixtureRequest
) -> None:
    await catalog.page_refs.begin_creation("child")
    assert await catalog.page_refs.get_orphaned() == []
    await fork(parent, "child", (parent, 1))
    request.getfixturevalue("no_patience")
    assert await catalog.page_refs.get_orphaned() == []


async def test_pages_of_an_abandoned_creation_are_orphaned_until_their_deletion_is_confirmed(
    catalog: Catalog, no_patience: None
) -> None:
    await catalog.page_refs.begin_creation("child")
    for _ in range(2):
        assert await catalog.page_refs.get_orphaned() == [OrphanedPages("child", 0)]
    await catalog.page_refs.confirm_deleted(OrphanedPages("child", 0))
    for _ in range(2):
        assert await catalog.page_refs.get_orphaned() == []


async def test_a_session_that_is_committed_after_its_creation_was_abandoned_keeps_its_pages(
    catalog: Catalog, parent: str, fork: Fork, no_patience: None
) -> None:
    await catalog.page_refs.begin_creation("child")
    await catalog.page_refs.get_orphaned()
    await fork(parent, "child", (parent, 1))
    assert await catalog.page_refs.get_orphaned() == []
    assert (await catalog.sessions.get("child")).turns == 2
    assert OrphanedPages("child", 0) in await catalog.sessions.delete("child", None)


async def test_a_session_under_the_id_of_a_deleted_one_starts_anew(
    catalog: Catalog,
    parent: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    fork: Fork,
) -> None:
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 0)]
    await catalog.sessions.create(make_session(parent), b"", None)
    await catalog.turns.commit(make_turn(parent, 1), 1, None)
    await fork(parent, "child", (parent, 3))
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 3)]
    assert await catalog.page_refs.get_retained() == [SharedPages(parent, 3)]


async def test_a_session_without_references_orphans_all_its_pages(
    catalog: Catalog, parent: str
) -> None:
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 0)]
    assert await catalog.page_refs.get_retained() == []


async def test_shared_pages_outlive_their_owner_as_far_as_they_are_referenced(
    catalog: Catalog, parent: str, fork: Fork
) -> None:
    for child, pages in (("short", 2), ("long", 5), ("middle", 3)):
        await fork(parent, child, (parent, pages))
    assert (await catalog.sessions.get("long")).shared == (SharedPages(parent, 5),)
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 5)]
    assert await catalog.page_refs.get_retained() == [SharedPages(parent, 5)]
    assert await delete_and_confirm(catalog, "short") == [OrphanedPages("short", 0)]
    assert await delete_and_confirm(catalog, "long") == [
        OrphanedPages("long", 0),
        OrphanedPages(parent, 3),
    ]
    assert await catalog.page_refs.get_retained() == [SharedPages(parent, 3)]
    assert await delete_and_confirm(catalog, "middle") == [
        OrphanedPages("middle", 0),
        OrphanedPages(parent, 0),
    ]
    assert await catalog.page_refs.get_retained() == []


async def test_a_fork_of_a_fork_references_every_owner_of_its_pages(
    catalog: Catalog, parent: str, fork: Fork
) -> None:
    await fork(parent, "child", (parent, 4))
    await fork("child", "grandchild", (parent, 4), ("child", 6))
    assert (await catalog.sessions.get("grandchild")).shared == (
        SharedPages(parent, 4),
        SharedPages("child", 6),
    )
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 4)]
    assert await delete_and_confirm(catalog, "child") == [OrphanedPages("child", 6)]
    await fork("grandchild", "last", (parent, 3))
    orphaned = await delete_and_confirm(catalog, "grandchild")
    assert orphaned[0] == OrphanedPages("grandchild", 0)
    assert sorted(orphaned[1:], key=str) == [OrphanedPages("child", 0), OrphanedPages(parent, 3)]
    assert await delete_and_confirm(catalog, "last") == [
        OrphanedPages("last", 0),
        OrphanedPages(parent, 0),
    ]


async def test_pages_that_are_gone_cannot_be_referenced(
    catalog: Catalog, parent: str, make_session: MakeSession, fork: Fork
) -> None:
    await catalog.sessions.create(make_session("s"), b"", None)
    assert not await catalog.page_refs.reserve("s", SharedPages("unknown", 1))
    await fork(parent, "child", (parent, 4))
    await catalog.sessions.delete(parent, None)
    assert not await catalog.page_refs.reserve("s", SharedPages(parent, 5))
    assert await catalog.page_refs.reserve("s", SharedPages(parent, 4))
    with pytest.raises(UnknownSession):
        await catalog.page_refs.reserve("unknown", SharedPages("s", 1))
    with pytest.raises(UnknownSession):
        await fork("child", "other", (parent, 5))
    with pytest.raises(UnknownSession):
        await catalog.sessions.get("other")


async def test_a_reservation_counts_until_a_turn_commits_the_references(
    catalog: Catalog, parent: str, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for id in ("uses", "does not"):
        await catalog.sessions.create(make_session(id), b"", None)
        assert await catalog.page_refs.reserve(id, SharedPages(parent, 5))
    assert (await catalog.sessions.get("uses")).shared == ()
    assert await delete_and_confirm(catalog, parent) == [OrphanedPages(parent, 5)]
    await catalog.turns.commit(
        replace(make_turn("uses", 1), shared=(SharedPages(parent, 2),)), 1, None
    )
    assert (await catalog.sessions.get("uses")).shared == (SharedPages(parent, 2),)
    await catalog.turns.commit(replace(make_turn("does not", 1), shared=()), 1, None)
    assert await catalog.page_refs.get_retained() == [SharedPages(parent, 2)]
    await catalog.turns.commit(make_turn("uses", 2), 1, None)
    assert (await catalog.sessions.get("uses")).shared == (SharedPages(parent, 2),)
    assert await delete_and_confirm(catalog, "does not") == [
        OrphanedPages("does not", 0),
        OrphanedPages(parent, 2),
    ]
    assert await delete_and_confirm(catalog, "uses") == [
        OrphanedPages("uses", 0),
        OrphanedPages(parent, 0),
    ]


async def test_sessions_are_found_that_begin_with_the_most_of_some_pages(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    async def find(*tokens: int) -> tuple[int, set[str]]:
        found = await catalog.page_refs.find_prefix("", join_ids(name_chain(tokens)))
        return found.pages, set(found.sessions)

    assert await find(0, 1) == (0, set())
    for id, tokens in (("one", [0, 0, 0]), ("two", [0, 0, 1]), ("three", [0, 0, 1, 1, 1])):
        await catalog.sessions.create(make_session(id), b"", None)
        page_ids = join_ids(name_chain(tokens))
        await catalog.turns.commit(replace(make_turn(id, 1), page_ids=page_ids), 1, None)
    assert await find(0, 0, 1, 1) == (4, {"three"})
    assert await find(0, 0, 1, 0) == (3, {"two", "three"})
    assert await find(0, 1) == (1, {"one", "two", "three"})
    assert await find(1) == (0, set())
    await catalog.sessions.delete("three", None)
    assert await find(0, 0, 1, 1) == (3, {"two"})
    await catalog.sessions.delete("two", None)
    assert await find(0, 0, 1, 1) == (2, {"one"})


async def test_a_look_up_of_pages_returns_a_few_of_many_sessions(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for token in range(SESSIONS_FOUND + 4):
        await catalog.sessions.create(make_session(f"s{token}"), b"", None)
        page_ids = join_ids(name_chain([0, token]))
        turn = replace(make_turn(f"s{token}", 1), page_ids=page_ids)
        await catalog.turns.commit(turn, 1, None)
    found = await catalog.page_refs.find_prefix("", join_ids(name_chain([0, 99])))
    assert found.pages == 1
    assert len(set(found.sessions)) == SESSIONS_FOUND


async def test_a_tenant_s_tokens_are_those_of_its_sessions(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn, fork: Fork
) -> None:
    for id, tenant in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        await catalog.sessions.create(make_session(id, tenant=tenant), b"", None)
    for id in ("a", "b", "c"):
        await catalog.turns.commit(make_turn(id, 1), 1, None)
    await fork("b", "e", ("b", 1))
    assert [(await catalog.sessions.get_use(tenant)).tokens for tenant in ("x", "y", "", "z")] == [
        21,
        7,
        0,
        0,
    ]
    await catalog.sessions.delete("a", None)
    assert [(await catalog.sessions.get_use(tenant)).tokens for tenant in ("x", "y")] == [14, 7]


async def test_the_response_of_a_request_that_created_a_session_is_deleted_with_it(
    catalog: Catalog, make_session: MakeSession
) -> None:
    key = IdempotencyKey("POST /sessions", "k", "body")
    await catalog.sessions.create(make_session("s"), b"", IdempotencyRecord(key, "s"))
    assert await catalog.idempotency.get(key) == "s"
    removal = IdempotencyKey("DELETE /sessions/s", "k", "", session="s")
    await catalog.sessions.delete("s", IdempotencyRecord(removal, "gone"))
    assert await catalog.idempotency.get(key) is None
    assert await catalog.idempotency.get(removal) == "gone"
    await catalog.sessions.create(make_session("t"), b"", IdempotencyRecord(key, "t"))
    assert await catalog.idempotency.get(key) == "t"
