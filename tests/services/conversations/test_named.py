"""Conversations that clients name: one writer at a time, limits, and each tenant's own."""

import asyncio
from dataclasses import replace

import pytest

from kvrecall.domain.errors import (
    DataKeyDeleted,
    IdempotencyConflict,
    LimitExceeded,
    QuotaExceeded,
    SessionBusy,
    UnknownConversation,
    UnknownItem,
)
from kvrecall.domain.limits import ServiceLimits
from services.catalog.records import IdempotencyKey
from services.catalog.responses import StoredItem
from services.conversations.named import NamedConversations

ITEMS = [StoredItem(f"msg_{number}", "{}") for number in range(3)]


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(
        queue_seconds=1.2,
        claim_seconds=0.9,
        tenant_conversations=2,
        max_conversation_items=3,
        max_conversation_bytes=1024,
    )


@pytest.fixture
def named(harness) -> NamedConversations:
    found: NamedConversations = harness.service.named_conversations
    return found


async def test_a_claim_lasts_while_it_is_held_and_ends_with_its_holder(named) -> None:
    id = (await named.create("ann", {}, [])).id
    first = await named.claim(id, "ann")
    with pytest.raises(SessionBusy, match=id):
        await named.claim(id, "ann")  # it was renewed meanwhile
    await first.release()
    second = await named.claim(id, "ann")
    await first.release()
    assert not await named._store.claim(id, "other", 1.0), "released twice, it is another's"
    await second.release()


async def test_one_that_waits_follows_as_soon_as_the_other_is_done(named) -> None:
    id = (await named.create("", {}, [])).id
    first = await named.claim(id, "")
    waiting = asyncio.create_task(named.claim(id, ""))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await first.release()
    await (await waiting).release()


async def test_conversations_and_their_items_are_limited_but_for_an_answer(named) -> None:
    id = (await named.create("ann", {"a": "b"}, ITEMS)).id
    with pytest.raises(LimitExceeded, match="3"):
        await named.add_items(id, "ann", [StoredItem("msg_9", "{}")])
    await named.add_answer(id, [StoredItem("msg_9", "{}")])
    assert await named.get_item(id, "ann", "msg_9") == StoredItem("msg_9", "{}")
    await named.create("ann", {}, [])
    with pytest.raises(QuotaExceeded, match="2"):
        await named.create("ann", {}, [])
    await named.create("ben", {}, [])
    with pytest.raises(LimitExceeded, match="metadata"):
        await named.update(id, "ann", {"a": "b" * 10_000})


async def test_a_conversation_is_bounded_in_bytes_from_its_first_items_to_its_answers(
    named,
) -> None:
    half, whole = StoredItem("msg_1", "x" * 600), StoredItem("msg_2", "x" * 1025)
    for items in ([whole], [half, replace(half, id="msg_3")], [*ITEMS, half]):
        with pytest.raises(LimitExceeded) as refused:
            await named.create("ann", {}, items)
        assert refused.value.details["field"] == "items"
    assert (await named._catalog.sessions.get_use("ann")).conversations == 0
    id = (await named.create("ann", {}, [half])).id
    with pytest.raises(LimitExceeded, match="1024 bytes"):
        await named.add_items(id, "ann", [replace(half, id="msg_3")])
    assert await named.get_all(id, "ann", []) == [half]
    with pytest.raises(LimitExceeded) as refused:
        await named.get_all(id, "ann", [replace(half, id="msg_3")])
    assert refused.value.details["field"] == "conversation"
    await named.add_answer(id, [whole])
    with pytest.raises(LimitExceeded, match="1625"):
        await named.get_all(id, "ann", [])


async def test_another_tenants_conversation_is_unknown(named) -> None:
    id = (await named.create("ann", {}, ITEMS)).id
    for call in (
        named.get(id, "ben"),
        named.update(id, "ben", {}),
        named.delete(id, "ben"),
        named.add_items(id, "ben", ITEMS),
        named.get_items(id, "ben", None, 9, False),
        named.get_all(id, "ben", []),
        named.get_item(id, "ben", "msg_0"),
        named.delete_item(id, "ben", "msg_0"),
        named.claim(id, "ben"),
    ):
        with pytest.raises(UnknownConversation, match=id):
            await call
    with pytest.raises(UnknownItem):
        await named.get_item(id, "ann", "msg_7")
    assert await named.get_items(id, "ann", None, 9, False) == ITEMS
    await named.delete(id, "ann")


async def test_a_conversation_that_nobody_can_read_is_deleted_all_the_same(
    named, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = (await named.create("ann", {}, [])).id

    async def refuse(conversation_id: str, tenant: str) -> None:
        raise DataKeyDeleted

    with monkeypatch.context() as patched:
        patched.setattr(named._store, "get", refuse)
        await named.delete(id, "ann")
    with pytest.raises(UnknownConversation):
        await named.get(id, "ann")


async def test_requests_of_one_key_make_one_conversation(named) -> None:
    key = IdempotencyKey("ann POST /v1/conversations", "one", "body")
    made = await asyncio.gather(
        *(named.create("ann", {"a": "b"}, [StoredItem(f"msg_{n}", "{}")], key) for n in range(4))
    )
    assert made == [made[0]] * 4
    assert len(await named.get_items(made[0].id, "ann", None, 9, False)) == 1
    with pytest.raises(IdempotencyConflict):
        await named.create("ann", {}, [], replace(key, fingerprint="other"))
    other = await named.create("ann", {}, [], replace(key, key="two"))
    assert other.id != made[0].id
    with pytest.raises(QuotaExceeded):
        await named.create("ann", {}, [], replace(key, key="three"))
    assert await named.create("ann", {"a": "b"}, [], key) == made[0], "it takes no room again"


async def test_requests_of_one_key_append_their_items_once(named) -> None:
    id = (await named.create("ann", {}, [])).id
    key = IdempotencyKey(f"ann POST /v1/conversations/{id}/items", "one", "body")
    added = await asyncio.gather(
        *(named.add_items(id, "ann", [StoredItem(f"msg_{n}", "{}")], key) for n in range(4))
    )
    assert added == [added[0]] * 4
    assert await named.get_items(id, "ann", None, 9, False) == list(added[0])
