"""Quotas in the commit: of any number of creations at once no more succeed than there is room for."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest

from kvrecall.domain.errors import QuotaExceeded
from kvrecall.domain.session_settings import ForkOrigin
from services.catalog.base import Catalog
from services.catalog.records import ForkCommit, IdempotencyKey, IdempotencyRecord
from services.catalog.responses.base import StoredConversation

LIMIT = 5
AT_ONCE = 30


async def count_refused(creations: Sequence[Awaitable[object]]) -> int:
    """Create all at once; return how many were refused by the quota, and raise any other error."""
    results = await asyncio.gather(*creations, return_exceptions=True)
    refused = [each for each in results if isinstance(each, QuotaExceeded)]
    others = [each for each in results if isinstance(each, Exception) and each not in refused]
    assert others == []
    assert all(each.details["limit"] == LIMIT for each in refused)
    return len(refused)


async def test_of_creations_at_once_as_many_succeed_as_there_is_room_for(
    catalog: Catalog, make_session
) -> None:
    sessions = [make_session(f"s{number}", tenant="ann") for number in range(AT_ONCE)]
    creations = [catalog.sessions.create(each, b"", None, LIMIT) for each in sessions]
    assert await count_refused(creations) == AT_ONCE - LIMIT
    created = await catalog.sessions.get_ids()
    assert len(created) == await catalog.sessions.count("ann") == LIMIT
    await catalog.sessions.create(make_session("other", tenant="ben"), b"", None, LIMIT)
    await catalog.sessions.delete(created[0], None)
    await catalog.sessions.create(make_session("next", tenant="ann"), b"", None, LIMIT)
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.create(make_session("last", tenant="ann"), b"", None, LIMIT)


async def test_forks_at_once_are_counted_as_creations(catalog: Catalog, make_session, make_turn):
    parent = make_session("parent", tenant="ann")
    await catalog.sessions.create(parent, b"", None, LIMIT)
    await catalog.turns.commit(make_turn("parent", 1), 1, None)
    settings = replace(parent.settings, forked_from=ForkOrigin("parent", 1))
    children = [
        replace(parent, id=f"child{number}", settings=settings, turns=1)
        for number in range(AT_ONCE)
    ]
    forks = [
        catalog.sessions.fork(ForkCommit(child, "parent", 1, b""), None, LIMIT)
        for child in children
    ]
    assert await count_refused(forks) == AT_ONCE - LIMIT + 1
    assert len(await catalog.sessions.get_ids()) == LIMIT


async def test_a_refused_creation_leaves_no_record_of_its_request(
    catalog: Catalog, make_session
) -> None:
    await catalog.sessions.create(make_session("s", tenant="ann"), b"", None, 1)
    key = IdempotencyKey("POST /v1/sessions", "key", "body")
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.create(
            make_session("t", tenant="ann"), b"", IdempotencyRecord(key, "t"), 1
        )
    assert await catalog.idempotency.get(key) is None
    await catalog.sessions.delete("s", None)
    await catalog.sessions.create(
        make_session("u", tenant="ann"), b"", IdempotencyRecord(key, "u"), 1
    )
    assert await catalog.idempotency.get(key) == "u"


async def test_of_conversations_at_once_as_many_are_made_as_there_is_room_for(
    catalog: Catalog,
) -> None:
    store = catalog.conversations
    new = [StoredConversation(f"conv_{number}", "ann", 1) for number in range(AT_ONCE)]
    creations = [store.create(each, [], None, LIMIT) for each in new]
    assert await count_refused(creations) == AT_ONCE - LIMIT
    assert await store.count("ann") == LIMIT
    assert await store.create(StoredConversation("conv_other", "ben", 1), [], None, LIMIT)
