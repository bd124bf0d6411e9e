"""Conversations that clients name: their items in order, and who may add some now."""

import asyncio
from dataclasses import replace

import pytest

from kvrecall.domain.errors import (
    CatalogError,
    IdempotencyConflict,
    LimitExceeded,
    UnknownConversation,
    UnknownItem,
)
from services.catalog.base import Catalog
from services.catalog.quota import TenantLimits
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.responses import ItemBounds, StoredConversation, StoredItem

MOST = ItemBounds(100, 10_000)
CONVERSATION = StoredConversation("conv_1", "ann", 1_700_000_000, {"topic": "Grüße"})
ITEMS = [StoredItem(f"msg_{number}", f'{{"n": {number}}}') for number in range(5)]

KEY = IdempotencyKey("POST /v1/conversations", "one", "body")


@pytest.fixture
async def stored(catalog: Catalog) -> Catalog:
    """A catalog with a conversation of five items."""
    await catalog.conversations.create(CONVERSATION, ITEMS[:2])
    await catalog.conversations.add_items("conv_1", ITEMS[2:], MOST)
    return catalog


async def ids(catalog: Catalog, after: str | None = None, limit: int = 9, newest: bool = False):
    found = await catalog.conversations.get_items("conv_1", after, limit, newest)
    return [item.id for item in found]


async def test_a_conversation_has_its_metadata_and_its_items_in_order(stored: Catalog) -> None:
    assert await stored.conversations.get("conv_1", "ann") == CONVERSATION
    with pytest.raises(UnknownConversation, match="conv_1"):
        await stored.conversations.get("conv_1", "ben")
    assert await stored.conversations.get_items("conv_1", None, 9, False) == ITEMS
    assert await stored.conversations.get_item("conv_1", "msg_3") == ITEMS[3]
    await stored.conversations.update("conv_1", {"topic": "other"})
    assert (await stored.conversations.get("conv_1", "ann")).metadata == {"topic": "other"}


async def test_items_are_read_in_pages_in_both_orders(stored: Catalog) -> None:
    assert await ids(stored, None, 2) == ["msg_0", "msg_1"]
    assert await ids(stored, "msg_1", 2) == ["msg_2", "msg_3"]
    assert await ids(stored, "msg_4") == []
    assert await ids(stored, None, 2, newest=True) == ["msg_4", "msg_3"]
    assert await ids(stored, "msg_1", 2, newest=True) == ["msg_0"]
    with pytest.raises(UnknownItem, match="msg_9"):
        await ids(stored, "msg_9")


async def test_an_item_is_added_once_and_deleted_by_itself(stored: Catalog) -> None:
    again = [ITEMS[1], StoredItem("msg_5", "{}")]
    await stored.conversations.add_items("conv_1", again, MOST)
    await stored.conversations.delete_item("conv_1", "msg_3")
    assert await ids(stored) == ["msg_0", "msg_1", "msg_2", "msg_4", "msg_5"]
    for call in (stored.conversations.get_item, stored.conversations.delete_item):
        with pytest.raises(UnknownItem, match="msg_3"):
            await call("conv_1", "msg_3")
    await stored.conversations.delete_item("conv_1", "msg_5")
    await stored.conversations.add_items("conv_1", [StoredItem("msg_6", "{}")], MOST)
    assert await ids(stored, None, 1, newest=True) == ["msg_6"]


async def test_items_over_the_limit_are_refused_together(stored: Catalog) -> None:
    more = [StoredItem("msg_5", "{}"), StoredItem("msg_6", "{}")]
    six = ItemBounds(6, 10_000)
    with pytest.raises(LimitExceeded, match="6"):
        await stored.conversations.add_items("conv_1", more, six)
    assert len(await ids(stored)) == 5
    await stored.conversations.add_items("conv_1", [ITEMS[0], more[0]], six)
    assert len(await ids(stored)) == 6


async def test_items_are_bounded_by_the_bytes_of_all_their_bodies(stored: Catalog) -> None:
    """A character of two bytes counts as two; one that is there already counts once."""
    before = sum(len(item.body) for item in ITEMS)
    more = [StoredItem("msg_5", '"ü"'), StoredItem("msg_6", '"ü"')]
    bounds = ItemBounds(100, before + 7)
    with pytest.raises(LimitExceeded, match=f"{before + 7} bytes.*{before + 8}") as refused:
        await stored.conversations.add_items("conv_1", more, bounds)
    assert refused.value.details == {"field": "items", "limit": before + 7}
    assert await ids(stored) == [item.id for item in ITEMS]
    await stored.conversations.add_items("conv_1", [ITEMS[0], more[0]], bounds)
    await stored.conversations.delete_item("conv_1", "msg_5")
    await stored.conversations.add_items("conv_1", more[1:], bounds)
    assert await ids(stored, limit=1, newest=True) == ["msg_6"]


async def test_concurrent_additions_stay_within_the_bytes(stored: Catalog) -> None:
    before = sum(len(item.body) for item in ITEMS)
    bounds = ItemBounds(100, before + 6)
    added = [[StoredItem(f"new_{number}", "{}")] for number in range(8)]
    outcomes = await asyncio.gather(
        *(stored.conversations.add_items("conv_1", each, bounds) for each in added),
        return_exceptions=True,
    )
    assert sum(isinstance(each, LimitExceeded) for each in outcomes) == 5
    assert len(await ids(stored)) == 8


async def test_all_items_are_read_if_they_are_within_the_bounds(stored: Catalog) -> None:
    size = sum(len(item.body) for item in ITEMS)
    assert await stored.conversations.get_all("conv_1", ItemBounds(5, size)) == ITEMS
    for bounds in (ItemBounds(4, size), ItemBounds(5, size - 1)):
        with pytest.raises(LimitExceeded) as refused:
            await stored.conversations.get_all("conv_1", bounds)
        assert refused.value.details["field"] == "conversation"
    await stored.conversations.add_items("conv_1", [StoredItem("msg_5", "{}")], None)
    with pytest.raises(LimitExceeded):
        await stored.conversations.get_all("conv_1", ItemBounds(5, size))


async def test_a_deleted_conversation_is_unknown_with_its_items(stored: Catalog) -> None:
    calls = stored.conversations
    await calls.delete("conv_1")
    for call in (
        calls.get("conv_1", "ann"),
        calls.delete("conv_1"),
        calls.update("conv_1", {}),
        calls.add_items("conv_1", ITEMS, MOST),
        calls.get_items("conv_1", None, 9, False),
        calls.get_all("conv_1", MOST),
    ):
        with pytest.raises(UnknownConversation, match="conv_1"):
            await call
    with pytest.raises(UnknownItem):
        await calls.get_item("conv_1", "msg_0")


async def test_conversations_are_counted_by_tenant(stored: Catalog) -> None:
    await stored.conversations.create(StoredConversation("conv_2", "", 1), [])
    assert (await stored.sessions.get_use("ann")).conversations == 1
    assert (await stored.sessions.get_use("")).conversations == 1
    await stored.conversations.delete("conv_1")
    assert [(await stored.sessions.get_use(each)).conversations for each in ("ann", "", "bob")] == [
        0,
        1,
        0,
    ]


async def test_one_holder_at_a_time_may_add_and_a_claim_ends_by_itself(stored: Catalog) -> None:
    calls = stored.conversations
    assert await calls.claim("conv_1", "one", 60)
    assert await calls.claim("conv_1", "one", 0.05)
    for _ in range(1000):
        if await calls.claim("conv_1", "two", 60):
            break
        await asyncio.sleep(0.005)
    assert not await calls.claim("conv_1", "one", 60)
    await calls.release("conv_1", "one")
    assert not await calls.claim("conv_1", "one", 60)
    await calls.release("conv_1", "two")
    assert await calls.claim("conv_1", "one", 60)


async def test_a_creation_that_comes_twice_is_one_whatever_the_quota(catalog: Catalog) -> None:
    store = catalog.conversations
    record = IdempotencyRecord(replace(KEY, session="conv_1"), "{}")
    limits = TenantLimits(conversations=1)
    made = await asyncio.gather(
        *(store.create(CONVERSATION, ITEMS[:2], record, limits) for _ in range(3))
    )
    assert sorted(made) == [False, False, True]
    assert await ids(catalog) == ["msg_0", "msg_1"]
    assert await catalog.idempotency.get(record.key) == "{}"
    with pytest.raises(IdempotencyConflict):
        await catalog.idempotency.get(replace(record.key, fingerprint="other"))
    await store.delete("conv_1")
    assert await store.create(CONVERSATION, ITEMS[:1], record, limits), (
        "what was deleted is made again"
    )
    assert await ids(catalog) == ["msg_0"]


async def test_items_of_one_request_are_added_once(stored: Catalog) -> None:
    record = IdempotencyRecord(replace(KEY, session="conv_1"), '"first"')
    await stored.conversations.add_items("conv_1", [StoredItem("msg_5", "{}")], MOST, record)
    with pytest.raises(CatalogError):
        await stored.conversations.add_items("conv_1", [StoredItem("msg_6", "{}")], MOST, record)
    assert await stored.idempotency.get(record.key) == '"first"'
    assert (await ids(stored))[-1] == "msg_5"
