"""Responses and conversations in the Redis catalog.

A response is one key that expires. The keys of a conversation have one hash tag, so each change of
it is one script. A tenant's conversations are counted in an index in another slot, which is written
first: after a crash it may have an entry too many, which is removed when it is met.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from kvrecall.domain.errors import (
    CatalogError,
    QuotaExceeded,
    UnknownConversation,
    UnknownItem,
    UnknownResponse,
    UnknownSession,
)
from services.cancellation import run_to_completion
from services.catalog.encryption.cipher import Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys
from services.catalog.redis.connection.shared import Argument, Command
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import list_within
from services.catalog.redis.indexes.tenant_use import (
    CONVERSATION,
    RESPONSE,
    Growth,
    RedisTenantUse,
)
from services.catalog.redis.slot.slot import require_own_slot
from services.catalog.responses import (
    ItemBounds,
    StoredConversation,
    StoredItem,
    StoredResponse,
)


class RedisResponses:
    """Responses by their ids, each with a time to live."""

    def __init__(
        self, redis: CatalogRedis, keys: Keys, use: RedisTenantUse, encryption: Encryption
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._use = use
        self._ciphers = encryption.tenants

    async def store(
        self, response: StoredResponse, seconds: float, limits: TenantLimits = UNLIMITED
    ) -> None:
        """Store a response for so long. Raises UnknownSession, QuotaExceeded."""
        if not await self._has_session(response.session):
            raise UnknownSession(response.session)
        name = self._keys.get_response(response.id, response.tenant)
        cipher = await self._ciphers.to_write(response.tenant)
        text = cipher.seal(json.dumps(asdict(response)).encode(), f"response {response.id}")
        growth = Growth(RESPONSE + response.id, len(text))
        await self._use.reserve(response.tenant, growth, limits)
        lifetime = max(1, round(1000 * seconds))
        write = self._redis.write(name, "SET", name, text, "GET", "PX", lifetime)
        replaced: bytes | None = await run_to_completion(write)
        await self._use.settle(response.tenant, growth, growth.bytes - len(replaced or b""))

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a tenant's response. Raises UnknownResponse, also when its session is gone."""
        name = self._keys.get_response(response_id, tenant)
        found: bytes | None = await self._redis.read(name, "GET", name)
        if found is not None:
            cipher = await self._ciphers.to_read(tenant)
            text = cipher.open(found, f"response {response_id}")
            response = StoredResponse(**json.loads(text))
            if await self._has_session(response.session):
                return response
        raise UnknownResponse(response_id)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response. Raises UnknownResponse."""
        await self.get(response_id, tenant)
        name = self._keys.get_response(response_id, tenant)
        await run_to_completion(self._redis.write(name, "DEL", name))
        await self._use.remove(tenant, RESPONSE + response_id)

    async def _has_session(self, session: str) -> bool:
        meta = self._keys.get_meta(session)
        return bool(await self._redis.read(meta, "EXISTS", meta))


class RedisConversations:
    """Conversations and their items. Raises CatalogError."""

    def __init__(
        self,
        redis: CatalogRedis,
        keys: Keys,
        use: RedisTenantUse,
        encryption: Encryption,
        idempotency: RedisIdempotency,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._use = use
        self._encryption = encryption
        self._idempotency = idempotency

    async def create(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> bool:
        """Add a conversation; False if there is one of that id already. Raises QuotaExceeded."""
        tenant = conversation.tenant
        index = self._keys.get_conversations(tenant)
        known = await self._redis.read(index, "ZSCORE", index, conversation.id) is not None
        most = limits.conversations
        await list_within(self._redis, index, time.time(), conversation.id, most, "conversations")
        try:
            return await self._add(conversation, items, None, record, limits, creates=True)
        except QuotaExceeded:
            if not known:
                await self._redis.write(index, "ZREM", index, conversation.id)
            raise

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a tenant's conversation. Raises UnknownConversation."""
        name = self._keys.get_conversation(conversation_id)
        owner: bytes | None = await self._redis.read(name, "HGET", name, "tenant")
        if owner is None or owner.decode() != tenant:
            raise UnknownConversation(conversation_id)
        return await self._get(conversation_id)

    async def update(self, conversation_id: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata. Raises UnknownConversation."""
        name = self._keys.get_conversation(conversation_id)
        cipher = await self._encryption.conversations.to_write(conversation_id)
        changed = replace(await self._get(conversation_id), metadata=metadata)
        fields = _encode(changed, cipher)
        call = ("EVAL", scripts.UPDATE_CONVERSATION, 1, name, fields)
        if not await run_to_completion(self._redis.write(name, *call)):
            raise UnknownConversation(conversation_id)

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises UnknownConversation."""
        names = self._names(conversation_id)
        owner: bytes | None = await self._redis.read(names[0], "HGET", names[0], "tenant")
        if owner is None:
            raise UnknownConversation(conversation_id)
        tenant = owner.decode()
        await run_to_completion(self._redis.write(names[0], "DEL", *names))
        index = self._keys.get_conversations(tenant)
        await self._redis.write(index, "ZREM", index, conversation_id)
        await self._use.remove(tenant, CONVERSATION + conversation_id)

    async def add_items(
        self,
        conversation_id: str,
        items: Sequence[StoredItem],
        bounds: ItemBounds | None,
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append the items whose ids are new.

        Raises UnknownConversation, LimitExceeded, QuotaExceeded.
        """
        conversation = await self._get(conversation_id)
        await self._add(conversation, items, bounds, record, limits, creates=False)

    async def get_items(
        self, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredItem]:
        """Return up to `limit` items. Raises UnknownConversation, UnknownItem for `after`."""
        order = "1" if newest_first else ""
        return await self._read(conversation_id, after or "", limit, order, None)

    async def get_all(self, conversation_id: str, bounds: ItemBounds) -> list[StoredItem]:
        """Return all items in order. Raises UnknownConversation, LimitExceeded."""
        return await self._read(conversation_id, "", bounds.items, "", bounds)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem:
        """Return an item. Raises UnknownItem."""
        *_, bodies = self._names(conversation_id)
        found: bytes | None = await self._redis.read(bodies, "HGET", bodies, item_id)
        if found is None:
            raise UnknownItem(item_id)
        cipher = await self._encryption.conversations.to_read(conversation_id)
        return _to_item(conversation_id, item_id, found, cipher)

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Delete an item. Raises UnknownItem."""
        await self.get_item(conversation_id, item_id)
        names = self._names(conversation_id)
        call: Command = ("EVAL", scripts.DELETE_ITEM, len(names), *names, item_id)
        freed = int(await run_to_completion(self._redis.write(names[0], *call)))
        tenant = (await self._get(conversation_id)).tenant
        await self._use.settle(tenant, Growth(CONVERSATION + conversation_id, 0), -max(0, freed))

    async def claim(self, conversation_id: str, holder: str, seconds: float) -> bool:
        """Claim the conversation, or extend the holder's claim; False if another one has it."""
        claim = self._keys.get_conversation(conversation_id) + ":claim"
        milliseconds = max(1, round(1000 * seconds))
        call = ("EVAL", scripts.SET_IF_EQUAL, 1, claim, holder, holder, milliseconds)
        return bytes(await self._redis.read(claim, *call)) == holder.encode()

    async def release(self, conversation_id: str, holder: str) -> None:
        """Release the holder's claim."""
        claim = self._keys.get_conversation(conversation_id) + ":claim"
        await self._redis.read(claim, "EVAL", scripts.DELETE_IF_EQUAL, 1, claim, holder)

    async def _get(self, conversation_id: str) -> StoredConversation:
        name = self._keys.get_conversation(conversation_id)
        fields: bytes | None = await self._redis.read(name, "HGET", name, "fields")
        if fields is None:
            raise UnknownConversation(conversation_id)
        cipher = await self._encryption.conversations.to_read(conversation_id)
        return StoredConversation(**json.loads(cipher.open(fields, f"fields {conversation_id}")))

    async def _read(
        self, conversation_id: str, after: str, limit: int, order: str, bounds: ItemBounds | None
    ) -> list[StoredItem]:
        names = self._names(conversation_id)
        cipher = await self._encryption.conversations.to_read(conversation_id)
        words: Command = (after, limit, order, *_to_words(bounds, cipher.overhead))
        call = ("EVAL", scripts.READ_ITEMS, len(names), *names, *words)
        outcome, *found = await self._redis.read(names[0], *call)
        if outcome == b"unknown":
            raise UnknownConversation(conversation_id)
        if outcome == b"item":
            raise UnknownItem(after)
        if outcome == b"full" and bounds is not None:
            items, size = found
            bounds.check(items, size, "conversation")
        pairs = zip(found[::2], found[1::2], strict=True)
        return [_to_item(conversation_id, id.decode(), body, cipher) for id, body in pairs]

    async def _add(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        bounds: ItemBounds | None,
        record: IdempotencyRecord | None,
        limits: TenantLimits,
        *,
        creates: bool,
    ) -> bool:
        """Add items, and the conversation if it `creates` it; False if that exists already."""
        cipher = await self._encryption.tenants.to_write(conversation.tenant)
        fields, tenant = (
            (_encode(conversation, cipher), conversation.tenant) if creates else (b"", "")
        )
        bodies = [(item.id, _seal_body(conversation.id, item, cipher)) for item in items]
        size = sum(len(body) for _, body in bodies) + len(fields)
        growth = Growth(CONVERSATION + conversation.id, size)
        await self._use.reserve(conversation.tenant, growth, limits)
        record = await self._idempotency.seal(record)
        first = (fields, tenant)
        words = _to_words(bounds, cipher.overhead)
        outcome, *found = await self._run_add(conversation.id, bodies, words, record, first)
        grown = int(found[0]) if outcome == b"done" else 0
        await self._use.settle(conversation.tenant, growth, grown)
        if outcome == b"unknown":
            raise UnknownConversation(conversation.id)
        if outcome == b"answered":
            raise CatalogError("the request was answered already; ask for its answer")
        if outcome == b"full" and bounds is not None:
            bounds.check(*found)
        return bool(outcome == b"done")

    async def _run_add(
        self,
        conversation_id: str,
        bodies: Sequence[tuple[str, bytes]],
        bounds: Command,
        record: IdempotencyRecord | None,
        first: tuple[bytes, str],
    ) -> list[Any]:
        """Run the script that adds items; `first`: fields and tenant of a new conversation.

        `bodies`: ids of the items, with the bodies as they are stored.
        """
        names = self._names(conversation_id)
        text = ""
        if record is not None:
            require_own_slot(record, conversation_id)
            names.append(self._keys.get_record(record.key))
            text = RedisIdempotency.encode(record, created="")
        words: list[Argument] = [*first, *bounds, text, RedisIdempotency.MILLISECONDS]
        for item in bodies:
            words += item
        call = ("EVAL", scripts.ADD_ITEMS, len(names), *names, *words)
        added: list[Any] = await run_to_completion(self._redis.write(names[0], *call))
        return added

    def _names(self, conversation_id: str) -> list[str]:
        """Return the keys of a conversation as its scripts take them."""
        name = self._keys.get_conversation(conversation_id)
        return [name, f"{name}:order", f"{name}:items"]


def _to_words(bounds: ItemBounds | None, overhead: int) -> Command:
    """Return the bounds as scripts take them, with the bytes that the encryption of a body takes."""
    return ("", "", overhead) if bounds is None else (bounds.items, bounds.bytes, overhead)


def _encode(conversation: StoredConversation, cipher: Cipher) -> bytes:
    fields = replace(conversation, metadata=dict(conversation.metadata))
    return cipher.seal(json.dumps(asdict(fields)).encode(), f"fields {conversation.id}")


def _seal_body(conversation: str, item: StoredItem, cipher: Cipher) -> bytes:
    return cipher.seal(item.body.encode(), f"item {conversation} {item.id}")


def _to_item(conversation: str, item: str, body: bytes, cipher: Cipher) -> StoredItem:
    return StoredItem(item, cipher.open_text(body, f"item {conversation} {item}"))
