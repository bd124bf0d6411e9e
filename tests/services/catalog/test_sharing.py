"""Pages that several sessions use: who owns them, until when they are kept, and what becomes of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvrecall.domain.errors import UnknownSession
from kvrecall.domain.session import Session, SharedPages
from services.catalog.base import (
    Catalog,
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    KnownPrefix,
    OrphanedPages,
    TurnCommit,
)

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


@pytest.fixture
def fork(catalog: Catalog, make_turn: MakeTurn) -> Callable[..., object]:
    """fork(parent, child, *shared): a session that begins with others' pages; `shared` by owner and pages."""

    async def make(parent: str, child: str, *shared: tuple[str, int]) -> None:
        begins = await catalog.session(parent)
        lineage = tuple(SharedPages(*each) for each in shared)
        await catalog.fork(
            ForkCommit(replace(begins, id=child, shared=lineage), parent, begins.turns, b"child"),
            None,
        )

    return make


@pytest.fixture
async def parent(catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn) -> str:
    """A session with two turns."""
    await catalog.create(make_session("parent"), b"", None)
    for number in (1, 2):
        await catalog.commit_turn(make_turn("parent", number), 1, None)
    return "parent"


async def deleted(catalog: Catalog, session: str) -> list[OrphanedPages]:
    """Delete a session, and have the workers let go of what is left."""
    leftovers = await catalog.delete(session, None)
    for left in leftovers:
        await catalog.dropped(left)
    return leftovers


async def test_what_nobody_needs_is_told_until_it_was_dropped(
    catalog: Catalog, parent: str, make_session: MakeSession, fork: Callable[..., object]
) -> None:
    await fork(parent, "child", (parent, 5))
    assert await catalog.leftovers() == []
    assert await catalog.delete(parent, None) == [OrphanedPages(parent, 5)]
    assert await catalog.leftovers() == [OrphanedPages(parent, 5)]
    assert await catalog.delete("child", None) == [
        OrphanedPages("child", 0),
        OrphanedPages(parent, 0),
    ]
    await catalog.dropped(OrphanedPages(parent, 5))  # late: it was told of more since
    assert sorted(await catalog.leftovers(), key=str) == [
        OrphanedPages("child", 0),
        OrphanedPages(parent, 0),
    ]
    await catalog.create(make_session("other"), b"", None)
    told = await catalog.delete("other", None)
    assert (told[0], set(told[1:])) == (
        OrphanedPages("other", 0),
        {OrphanedPages("child", 0), OrphanedPages(parent, 0)},
    )
    for left in told:
        await catalog.dropped(left)
    assert await catalog.leftovers() == []


async def test_a_session_of_an_id_that_was_deleted_before_begins_anew(
    catalog: Catalog,
    parent: str,
    make_session: MakeSession,
    make_turn: MakeTurn,
    fork: Callable[..., object],
) -> None:
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 0)]
    await catalog.create(make_session(parent), b"", None)
    await catalog.commit_turn(make_turn(parent, 1), 1, None)
    await fork(parent, "child", (parent, 3))
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 3)]
    assert await catalog.kept_pages() == [SharedPages(parent, 3)]


async def test_a_session_that_nobody_shares_leaves_all_its_pages(
    catalog: Catalog, parent: str
) -> None:
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 0)]
    assert await catalog.kept_pages() == []


async def test_shared_pages_outlive_their_owner_as_far_as_they_are_used(
    catalog: Catalog, parent: str, fork: Callable[..., object]
) -> None:
    for child, pages in (("short", 2), ("long", 5), ("middle", 3)):
        await fork(parent, child, (parent, pages))
    assert (await catalog.session("long")).shared == (SharedPages(parent, 5),)
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 5)]
    assert await catalog.kept_pages() == [SharedPages(parent, 5)]
    assert await deleted(catalog, "short") == [OrphanedPages("short", 0)]
    assert await deleted(catalog, "long") == [OrphanedPages("long", 0), OrphanedPages(parent, 3)]
    assert await catalog.kept_pages() == [SharedPages(parent, 3)]
    assert await deleted(catalog, "middle") == [
        OrphanedPages("middle", 0),
        OrphanedPages(parent, 0),
    ]
    assert await catalog.kept_pages() == []


async def test_a_fork_of_a_fork_keeps_every_owner_of_its_pages(
    catalog: Catalog, parent: str, fork: Callable[..., object]
) -> None:
    await fork(parent, "child", (parent, 4))
    await fork("child", "grandchild", (parent, 4), ("child", 6))
    assert (await catalog.session("grandchild")).shared == (
        SharedPages(parent, 4),
        SharedPages("child", 6),
    )
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 4)]
    assert await deleted(catalog, "child") == [OrphanedPages("child", 6)]
    await fork("grandchild", "last", (parent, 3))
    told = await deleted(catalog, "grandchild")
    assert told[0] == OrphanedPages("grandchild", 0)
    assert sorted(told[1:], key=str) == [OrphanedPages("child", 0), OrphanedPages(parent, 3)]
    assert await deleted(catalog, "last") == [OrphanedPages("last", 0), OrphanedPages(parent, 0)]


async def test_pages_that_are_gone_are_not_shared(
    catalog: Catalog, parent: str, make_session: MakeSession, fork: Callable[..., object]
) -> None:
    await catalog.create(make_session("s"), b"", None)
    assert not await catalog.share("s", SharedPages("nobody", 1))
    await fork(parent, "child", (parent, 4))
    await catalog.delete(parent, None)
    assert not await catalog.share("s", SharedPages(parent, 5))
    assert await catalog.share("s", SharedPages(parent, 4))
    with pytest.raises(UnknownSession):
        await catalog.share("nobody", SharedPages("s", 1))
    with pytest.raises(UnknownSession):
        await fork("child", "other", (parent, 5))
    with pytest.raises(UnknownSession):
        await catalog.session("other")


async def test_what_may_be_shared_is_counted_until_a_turn_says_what_is(
    catalog: Catalog, parent: str, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    for id in ("uses", "does not"):
        await catalog.create(make_session(id), b"", None)
        assert await catalog.share(id, SharedPages(parent, 5))
    assert (await catalog.session("uses")).shared == ()
    assert await deleted(catalog, parent) == [OrphanedPages(parent, 5)]
    await catalog.commit_turn(
        replace(make_turn("uses", 1), shared=(SharedPages(parent, 2),)), 1, None
    )
    assert (await catalog.session("uses")).shared == (SharedPages(parent, 2),)
    await catalog.commit_turn(replace(make_turn("does not", 1), shared=()), 1, None)
    assert await catalog.kept_pages() == [SharedPages(parent, 2)]
    await catalog.commit_turn(make_turn("uses", 2), 1, None)
    assert (await catalog.session("uses")).shared == (SharedPages(parent, 2),)
    assert await deleted(catalog, "does not") == [
        OrphanedPages("does not", 0),
        OrphanedPages(parent, 2),
    ]
    assert await deleted(catalog, "uses") == [OrphanedPages("uses", 0), OrphanedPages(parent, 0)]


async def test_a_prefix_is_known_as_long_as_its_owner_is_there(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    assert await catalog.prefix("digest") is None
    for id in ("first", "second", "third"):
        await catalog.create(make_session(id), b"", None)

    async def offer(id: str) -> None:
        known = KnownPrefix(id, (1, 2**32 - 1))
        await catalog.commit_turn(replace(make_turn(id, 1), prefix=known, digest="digest"), 1, None)

    await offer("first")
    await offer("second")
    assert await catalog.prefix("digest") == KnownPrefix("first", (1, 2**32 - 1))
    assert await catalog.prefix("another") is None
    await catalog.delete("first", None)
    assert await catalog.prefix("digest") is None
    await offer("third")
    assert await catalog.prefix("digest") == KnownPrefix("third", (1, 2**32 - 1))
    await catalog.delete("second", None)
    assert await catalog.prefix("digest") == KnownPrefix("third", (1, 2**32 - 1))


async def test_a_tenant_s_tokens_are_those_of_its_sessions(
    catalog: Catalog, make_session: MakeSession, make_turn: MakeTurn, fork: Callable[..., object]
) -> None:
    for id, tenant in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        await catalog.create(make_session(id, tenant=tenant), b"", None)
    for id in ("a", "b", "c"):
        await catalog.commit_turn(make_turn(id, 1), 1, None)
    await fork("b", "e", ("b", 1))
    assert [await catalog.tenant_tokens(tenant) for tenant in ("x", "y", "", "z")] == [21, 7, 0, 0]
    await catalog.delete("a", None)
    assert [await catalog.tenant_tokens(tenant) for tenant in ("x", "y")] == [14, 7]


async def test_the_answer_of_a_request_that_made_a_session_goes_with_the_session(
    catalog: Catalog, make_session: MakeSession
) -> None:
    key = IdempotencyKey("POST /sessions", "k", "body")
    await catalog.create(make_session("s"), b"", IdempotencyRecord(key, "s"))
    assert await catalog.recall(key) == "s"
    removal = IdempotencyKey("DELETE /sessions/s", "k", "", session="s")
    await catalog.delete("s", IdempotencyRecord(removal, "gone"))
    assert await catalog.recall(key) is None
    assert await catalog.recall(removal) == "gone"
    await catalog.create(make_session("t"), b"", IdempotencyRecord(key, "t"))
    assert await catalog.recall(key) == "t"
