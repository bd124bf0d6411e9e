"""A tenant whose data key was deleted: nothing of it is read, by one clear error, and it begins anew."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvrecall.domain.errors import DataKeyDeleted
from kvrecall.domain.sessions.session import Session
from services.catalog.encryption.data_keys import CACHE_SECONDS
from services.catalog.encryption.keyring import Keyring
from services.catalog.records import IdempotencyKey, IdempotencyRecord, TurnCommit
from services.catalog.responses import StoredConversation, StoredItem

MakeSession = Callable[..., Session]
MakeTurn = Callable[..., TurnCommit]


async def test_what_a_tenant_had_is_unreadable_and_others_go_on(
    place: Any, keyring: Keyring, make_session: MakeSession, make_turn: MakeTurn
) -> None:
    catalog = await place.open(keyring)
    for tenant in ("ann", "bob"):
        session = make_session(tenant, tenant=tenant, expires_after_seconds=0.0)
        await catalog.sessions.create(session, b"state", None)
        turn = replace(make_turn(tenant, 1), lifetime=0.0)
        await catalog.turns.commit(turn, 1, None)
        conversation = StoredConversation(f"conv-{tenant}", tenant, 1)
        await catalog.conversations.create(conversation, [StoredItem("i", "{}")])
    assert await catalog.data_keys.delete("ann")
    assert not await catalog.data_keys.delete("ann")
    catalog = await place.open(keyring)
    for read in (
        catalog.sessions.get("ann"),
        catalog.sessions.get_worker_state("ann"),
        catalog.turns.get_after("ann", 0, 9),
        catalog.turns.get_token_ids("ann"),
        catalog.conversations.get("conv-ann", "ann"),
        catalog.conversations.get_items("conv-ann", None, 9, False),
    ):
        with pytest.raises(DataKeyDeleted, match="can no longer be decrypted"):
            await read
    assert (await catalog.sessions.get("bob")).turns == 1
    assert [each.id for each in await catalog.expiry.get_expired(9)] == ["bob"]
    assert not (await catalog.sessions.get_page(9, None, "ann")).sessions
    # What nobody can read is deleted by its name all the same.
    await catalog.sessions.delete("ann", None)
    await catalog.conversations.delete("conv-ann")
    assert await catalog.sessions.get_ids() == ["bob"]


async def test_a_tenant_without_a_key_begins_with_a_new_one(
    place: Any, keyring: Keyring, make_session: MakeSession
) -> None:
    catalog = await place.open(keyring)
    await catalog.sessions.create(make_session("before", tenant="ann"), b"", None)
    key = await catalog.data_keys.get_key("ann")
    await catalog.data_keys.delete("ann")
    await catalog.sessions.create(make_session("after", tenant="ann"), b"", None)
    assert await catalog.data_keys.get_key("ann") != key
    catalog = await place.open(keyring)
    assert (await catalog.sessions.get("after")).settings.tenant == "ann"
    with pytest.raises(DataKeyDeleted):
        await catalog.sessions.get("before")
    page = await catalog.sessions.get_page(9, None, "ann")
    assert [each.id for each in page.sessions] == ["after"]


async def test_an_answer_is_not_repeated_from_a_deleted_key(
    place: Any, keyring: Keyring, make_session: MakeSession
) -> None:
    catalog = await place.open(keyring)
    key = IdempotencyKey("create", "k", "f", tenant="ann")
    record = IdempotencyRecord(key, "{}")
    await catalog.sessions.create(make_session("s", tenant="ann"), b"", record)
    assert await catalog.idempotency.get(key) == "{}"
    await catalog.data_keys.delete("ann")
    with pytest.raises(DataKeyDeleted):
        await catalog.idempotency.get(key)


async def test_gateways_that_begin_with_a_tenant_at_once_use_one_key(
    shared_place: Any, keyring: Keyring, make_session: MakeSession
) -> None:
    gateways = [await shared_place.open(keyring) for _ in range(4)]
    creations = [
        gateway.sessions.create(make_session(f"s{number}", tenant="ann"), b"", None)
        for number, gateway in enumerate(gateways)
    ]
    await asyncio.gather(*creations)
    for gateway in gateways:
        page = await gateway.sessions.get_page(9, None, "ann")
        assert len(page.sessions) == len(gateways)


async def test_a_gateway_reads_what_another_one_wrote_after_it_had_looked(
    shared_place: Any, keyring: Keyring, make_session: MakeSession
) -> None:
    one, other = [await shared_place.open(keyring) for _ in range(2)]
    assert not (await other.sessions.get_page(9, None, "ann")).sessions
    await one.sessions.create(make_session("s", tenant="ann"), b"", None)
    assert (await other.sessions.get("s")).id == "s"
    assert CACHE_SECONDS <= 60
