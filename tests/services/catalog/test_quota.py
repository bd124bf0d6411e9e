"""Quotas in the commit: of any number of creations at once no more succeed than there is room for."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace

import pytest

from kvrecall.domain.errors import QuotaExceeded
from kvrecall.domain.messages import Message
from kvrecall.domain.settings.session import ForkOrigin
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import Catalog
from services.catalog.quota import TenantLimits, TenantUse
from services.catalog.records import (
    ForkCommit,
    IdempotencyKey,
    IdempotencyRecord,
    KeptState,
    TurnCommit,
)
from services.catalog.responses import StoredConversation, StoredItem, StoredResponse
from services.catalog.serialization import pack

LIMIT = 5
LIMITS = TenantLimits(sessions=LIMIT, conversations=LIMIT)
AT_ONCE = 100


async def count_refused(creations: Sequence[Awaitable[object]], limit: int | None = LIMIT) -> int:
    """Create all at once; return how many were refused by the quota, and raise any other error."""
    results = await asyncio.gather(*creations, return_exceptions=True)
    refused = [each for each in results if isinstance(each, QuotaExceeded)]
    others = [each for each in results if isinstance(each, Exception) and each not in refused]
    assert others == []
    assert all(each.details["limit"] == limit for each in refused)
    return len(refused)


async def test_of_creations_at_once_as_many_succeed_as_there_is_room_for(
    catalog: Catalog, make_session
) -> None:
    sessions = [make_session(f"s{number}", tenant="ann") for number in range(AT_ONCE)]
    creations = [catalog.sessions.create(each, b"", None, LIMITS) for each in sessions]
    assert await count_refused(creations) == AT_ONCE - LIMIT
    created = await catalog.sessions.get_ids()
    assert len(created) == await catalog.sessions.count("ann") == LIMIT
    await catalog.sessions.create(make_session("other", tenant="ben"), b"", None, LIMITS)
    await catalog.sessions.delete(created[0], None)
    await catalog.sessions.create(make_session("next", tenant="ann"), b"", None, LIMITS)
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.create(make_session("last", tenant="ann"), b"", None, LIMITS)


async def test_forks_at_once_are_counted_as_creations(catalog: Catalog, make_session, make_turn):
    parent = make_session("parent", tenant="ann")
    await catalog.sessions.create(parent, b"", None, LIMITS)
    await catalog.turns.commit(make_turn("parent", 1), 1, None)
    settings = replace(parent.settings, forked_from=ForkOrigin("parent", 1))
    children = [
        replace(parent, id=f"child{number}", settings=settings, turns=1)
        for number in range(AT_ONCE)
    ]
    forks = [
        catalog.sessions.fork(ForkCommit(child, "parent", 1, b""), None, LIMITS)
        for child in children
    ]
    assert await count_refused(forks) == AT_ONCE - LIMIT + 1
    assert len(await catalog.sessions.get_ids()) == LIMIT


async def test_a_refused_creation_leaves_no_record_of_its_request(
    catalog: Catalog, make_session
) -> None:
    await catalog.sessions.create(make_session("s", tenant="ann"), b"", None, TenantLimits(1))
    key = IdempotencyKey("POST /v1/sessions", "key", "body")
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.create(
            make_session("t", tenant="ann"), b"", IdempotencyRecord(key, "t"), TenantLimits(1)
        )
    assert await catalog.idempotency.get(key) is None
    await catalog.sessions.delete("s", None)
    await catalog.sessions.create(
        make_session("u", tenant="ann"), b"", IdempotencyRecord(key, "u"), TenantLimits(1)
    )
    assert await catalog.idempotency.get(key) == "u"


async def test_of_conversations_at_once_as_many_are_made_as_there_is_room_for(
    catalog: Catalog,
) -> None:
    store = catalog.conversations
    new = [StoredConversation(f"conv_{number}", "ann", 1) for number in range(AT_ONCE)]
    creations = [store.create(each, [], None, LIMITS) for each in new]
    assert await count_refused(creations) == AT_ONCE - LIMIT
    assert (await catalog.sessions.get_use("ann")).conversations == LIMIT
    assert await store.create(StoredConversation("conv_other", "ben", 1), [], None, LIMITS)


async def test_of_turns_at_once_as_many_are_committed_as_there_is_room_for_their_tokens(
    catalog: Catalog, make_session, make_turn, memory
) -> None:
    ids = [f"s{number}" for number in range(AT_ONCE)]
    for id in ids:
        await catalog.sessions.create(make_session(id, tenant="ann"), b"", None)
    limits = TenantLimits(tokens=LIMIT * memory.length + 1)
    turns = [catalog.turns.commit(make_turn(id, 1), 1, None, limits) for id in ids]
    assert await count_refused(turns, limits.tokens) == AT_ONCE - LIMIT
    assert (await catalog.sessions.get_use("ann")).tokens == LIMIT * memory.length
    committed = [id for id in ids if (await catalog.sessions.get(id)).turns]
    assert len(committed) == LIMIT
    refused = next(id for id in ids if id not in committed)
    assert await catalog.turns.get_token_ids(refused) == ()
    await catalog.sessions.delete(committed[0], None)
    await catalog.turns.commit(make_turn(refused, 1), 1, None, limits)
    assert (await catalog.sessions.get_use("ann")).tokens == LIMIT * memory.length


async def test_forks_at_once_hold_no_more_tokens_than_they_may(
    catalog: Catalog, make_session, make_turn, memory
) -> None:
    await catalog.sessions.create(make_session("parent", tenant="ann"), b"", None)
    await catalog.turns.commit(make_turn("parent", 1), 1, None)
    parent = await catalog.sessions.get("parent")
    settings = replace(parent.settings, forked_from=ForkOrigin("parent", 1))
    children = [replace(parent, id=f"child{n}", settings=settings) for n in range(AT_ONCE)]
    limits = TenantLimits(tokens=LIMIT * memory.length)
    forks = [
        catalog.sessions.fork(ForkCommit(child, "parent", 1, b""), None, limits)
        for child in children
    ]
    assert await count_refused(forks, limits.tokens) == AT_ONCE - LIMIT + 1
    assert (await catalog.sessions.get_use("ann")).tokens == LIMIT * memory.length
    assert len(await catalog.sessions.get_ids()) == LIMIT


@pytest.mark.parametrize(
    "kind", ["settings", "conversations", "items", "responses", "turns", "output"]
)
async def test_of_writes_at_once_as_many_succeed_as_there_is_room_for_their_bytes(
    catalog: Catalog, make_session, make_turn, calls, kind: str
) -> None:
    size = 100_000
    slack = size * 9 // 10  # for what is stored beside the text
    large = "x" * size
    store, item = catalog.conversations, StoredItem("msg_1", large)
    new = [StoredConversation(f"conv_{number}", "ann", 1) for number in range(AT_ONCE)]
    ids = [f"s{number}" for number in range(AT_ONCE)]
    if kind == "items":
        for each in new:
            await store.create(each, [])
    if kind in ("turns", "output"):
        for id in ids:
            await catalog.sessions.create(make_session(id, tenant="ann"), b"", None)
    if kind == "output":
        for id in ids:
            await catalog.turns.commit(make_turn(id, 1, *calls), 1, None)
    if kind == "responses":
        await catalog.sessions.create(make_session("s", tenant="ann"), b"", None)
    held = (await catalog.sessions.get_use("ann")).bytes
    limits = TenantLimits(bytes=held + LIMIT * size + slack)

    def write(number: int) -> Awaitable[object]:
        id = ids[number]
        if kind == "settings":
            session = make_session(id, tenant="ann", tools=(large,))
            return catalog.sessions.create(session, b"", None, limits)
        if kind == "conversations":
            return store.create(new[number], [item], None, limits)
        if kind == "items":
            return store.add_items(new[number].id, [item], None, None, limits)
        if kind == "responses":
            response = StoredResponse(f"r{number}", "ann", "s", 1, "o", "h", 0, large)
            return catalog.responses.store(response, 60.0, limits)
        if kind == "output":
            call = PendingCall(1, 0, calls[0])
            return catalog.tool_calls.commit(id, call, 1, None, (0, large), limits)
        turn = make_turn(id, 1).turn
        turn = replace(turn, messages=(Message("user", large),))
        return catalog.turns.commit(TurnCommit(turn, b""), 1, None, limits)

    writes = [write(number) for number in range(AT_ONCE)]
    assert await count_refused(writes, limits.bytes) == AT_ONCE - LIMIT
    use = await catalog.sessions.get_use("ann")
    assert LIMIT * size <= use.bytes - held <= LIMIT * size + slack


async def test_a_limit_that_was_lowered_refuses_only_what_adds_to_it(
    catalog: Catalog, make_session, make_turn, calls
) -> None:
    for id in ("s", "t"):
        await catalog.sessions.create(make_session(id, tenant="ann"), b"", None)
    lowered = TenantLimits(sessions=1, conversations=0)
    await catalog.turns.commit(make_turn("s", 1, *calls), 1, None, lowered)
    call = PendingCall(1, 0, calls[0])
    await catalog.tool_calls.commit("s", call, 1, None, (0, "output"), lowered)
    response = StoredResponse("r", "ann", "s", 1, "o", "h", 0, "{}")
    await catalog.responses.store(response, 60.0, lowered)
    with pytest.raises(QuotaExceeded):
        await catalog.sessions.create(make_session("u", tenant="ann"), b"", None, lowered)


async def test_what_is_deleted_counts_no_more(
    catalog: Catalog, overhead: int, make_session, make_turn, calls
):
    store = catalog.conversations
    await catalog.sessions.create(make_session("s", tenant="ann"), b"state", None)
    await catalog.turns.commit(
        replace(make_turn("s", 1, *calls), kept=KeptState(pack(b"kept"), 1)), 1, None
    )
    await catalog.turns.commit(
        replace(make_turn("s", 2), kept=KeptState(pack(b"kept"), 1)), 1, None
    )
    response = StoredResponse("r", "ann", "s", 1, "o", "h", 0, "{}")
    await catalog.responses.store(response, 60.0)
    await catalog.responses.store(replace(response, body="{ }"), 60.0)
    items = [StoredItem(f"msg_{number}", "body") for number in range(3)]
    await store.create(StoredConversation("conv", "ann", 1), items)
    await store.add_items("conv", [*items, StoredItem("msg_3", "body")], None)
    before = await catalog.sessions.get_use("ann")
    assert (before.sessions, before.conversations) == (1, 1)
    await store.delete_item("conv", "msg_0")
    after = await catalog.sessions.get_use("ann")
    assert before.bytes - after.bytes == len("body") + overhead
    await catalog.responses.delete("r", "ann")
    await store.delete("conv")
    await catalog.sessions.delete("s", None)
    assert await catalog.sessions.get_use("ann") == TenantUse()
