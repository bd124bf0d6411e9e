"""Responses and conversations in the Redis catalog.

A response is one key that expires. The keys of a conversation have one hash tag, so each change of
it is one script. A tenant's conversations are counted in an index in another slot, which is written
first: after a crash it may have an entry too many, which is removed when it is met.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from kvrecall.domain.errors import (
    CatalogError,
    UnknownConversation,
    UnknownItem,
    UnknownResponse,
    UnknownSession,
)
from services.cancellation import run_to_completion
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes import list_within
from services.catalog.redis.keys import Keys
from services.catalog.redis.shared_connection import Argument, Command
from services.catalog.redis.slot import require_own_slot
from services.catalog.responses.base import (
    ItemBounds,
    StoredConversation,
    StoredItem,
    StoredResponse,
)

# An index entry without its conversation is removed after this time: it may be in creation.
_STALE_SECONDS = 60.0
# The number of random index entries that one count checks.
_ENTRIES_CHECKED = 8


class RedisResponses:
    """Responses by their ids, each with a time to live."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def store(self, response: StoredResponse, seconds: float) -> None:
        """Store a response for so long. Raises UnknownSession."""
        if not await self._has_session(response.session):
            raise UnknownSession(response.session)
        name = self._keys.get_response(response.id, response.tenant)
        lifetime = max(1, round(1000 * seconds))
        write = self._redis.write(name, "SET", name, json.dumps(asdict(response)), "PX", lifetime)
        await run_to_completion(write)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a tenant's response. Raises UnknownResponse, also when its session is gone."""
        name = self._keys.get_response(response_id, tenant)
        found: bytes | None = await self._redis.read(name, "GET", name)
        if found is not None:
            response = StoredResponse(**json.loads(found))
            if await self._has_session(response.session):
                return response
        raise UnknownResponse(response_id)

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response. Raises UnknownResponse."""
        await self.get(response_id, tenant)
        name = self._keys.get_response(response_id, tenant)
        await run_to_completion(self._redis.write(name, "DEL", name))

    async def _has_session(self, session: str) -> bool:
        meta = self._keys.get_meta(session)
        return bool(await self._redis.read(meta, "EXISTS", meta))


class RedisConversations:
    """Conversations and their items. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def create(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        record: IdempotencyRecord | None = None,
        limit: int | None = None,
    ) -> bool:
        """Add a conversation; False if there is one of that id already. Raises QuotaExceeded."""
        index = self._keys.get_conversations(conversation.tenant)
        await list_within(self._redis, index, time.time(), conversation.id, limit, "conversations")
        return await self._add(conversation.id, items, None, record, conversation)

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a tenant's conversation. Raises UnknownConversation."""
        name = self._keys.get_conversation(conversation_id)
        owner: bytes | None = await self._redis.read(name, "HGET", name, "tenant")
        if owner is None or owner.decode() != tenant:
            raise UnknownConversation(conversation_id)
        return await self._get(conversation_id)

    async def count(self, tenant: str) -> int:
        """Return the number of the tenant's conversations, with those in creation."""
        index = self._keys.get_conversations(tenant)
        await self._correct(index)
        return int(await self._redis.read(index, "ZCARD", index))

    async def update(self, conversation_id: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata. Raises UnknownConversation."""
        name = self._keys.get_conversation(conversation_id)
        fields = _encode(replace(await self._get(conversation_id), metadata=metadata))
        call = ("EVAL", scripts.UPDATE_CONVERSATION, 1, name, fields)
        if not await run_to_completion(self._redis.write(name, *call)):
            raise UnknownConversation(conversation_id)

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises UnknownConversation."""
        found = await self._get(conversation_id)
        names = self._names(conversation_id)
        await run_to_completion(self._redis.write(names[0], "DEL", *names))
        index = self._keys.get_conversations(found.tenant)
        await self._redis.write(index, "ZREM", index, conversation_id)

    async def add_items(
        self,
        conversation_id: str,
        items: Sequence[StoredItem],
        bounds: ItemBounds | None,
        record: IdempotencyRecord | None = None,
    ) -> None:
        """Append the items whose ids are new. Raises UnknownConversation, LimitExceeded."""
        await self._add(conversation_id, items, bounds, record, None)

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
        return StoredItem(item_id, found.decode())

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Delete an item. Raises UnknownItem.

        Its place goes first: after a crash in between it is in no list any more.
        """
        await self.get_item(conversation_id, item_id)
        _, order, bodies = self._names(conversation_id)
        await run_to_completion(self._redis.write(order, "ZREM", order, item_id))
        await run_to_completion(self._redis.write(bodies, "HDEL", bodies, item_id))

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
        return StoredConversation(**json.loads(fields))

    async def _read(
        self, conversation_id: str, after: str, limit: int, order: str, bounds: ItemBounds | None
    ) -> list[StoredItem]:
        names = self._names(conversation_id)
        words: Command = (after, limit, order, *_to_words(bounds))
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
        return [StoredItem(id.decode(), body.decode()) for id, body in pairs]

    async def _add(
        self,
        conversation_id: str,
        items: Sequence[StoredItem],
        bounds: ItemBounds | None,
        record: IdempotencyRecord | None,
        created: StoredConversation | None,
    ) -> bool:
        """Add items, and the conversation if it is `created`; False if that exists already."""
        names = self._names(conversation_id)
        text = ""
        if record is not None:
            require_own_slot(record, conversation_id)
            names.append(self._keys.get_record(record.key))
            text = RedisIdempotency.encode(record, created="")
        first = ("", "") if created is None else (_encode(created), created.tenant)
        words: list[Argument] = [*first, *_to_words(bounds), text, RedisIdempotency.MILLISECONDS]
        for item in items:
            words += [item.id, item.body]
        call = ("EVAL", scripts.ADD_ITEMS, len(names), *names, *words)
        outcome, *found = await run_to_completion(self._redis.write(names[0], *call))
        if outcome == b"unknown":
            raise UnknownConversation(conversation_id)
        if outcome == b"answered":
            raise CatalogError("the request was answered already; ask for its answer")
        if outcome == b"full" and bounds is not None:
            bounds.check(*found)
        return bool(outcome == b"done")

    async def _correct(self, index: str) -> None:
        """Remove what is left of creations and deletions that broke off, of a few random entries."""
        command: Command = ("ZRANDMEMBER", index, _ENTRIES_CHECKED, "WITHSCORES")
        drawn = await self._redis.read(index, *command)
        if drawn and isinstance(drawn[0], bytes):  # the older version of the protocol
            drawn = list(zip(drawn[::2], drawn[1::2], strict=True))
        names = [self._keys.get_conversation(id.decode()) for id, _ in drawn]
        exist = await self._redis.read_each([(name, ("EXISTS", name)) for name in names])
        oldest = time.time() - _STALE_SECONDS
        for (id, created_at), exists in zip(drawn, exist, strict=True):
            if not exists and float(created_at) < oldest:
                await self._redis.read(index, "ZREM", index, id)

    def _names(self, conversation_id: str) -> list[str]:
        """Return the keys of a conversation as its scripts take them."""
        name = self._keys.get_conversation(conversation_id)
        return [name, f"{name}:order", f"{name}:items"]


def _to_words(bounds: ItemBounds | None) -> tuple[Argument, Argument]:
    """Return the bounds as scripts take them."""
    return ("", "") if bounds is None else (bounds.items, bounds.bytes)


def _encode(conversation: StoredConversation) -> str:
    fields = replace(conversation, metadata=dict(conversation.metadata))
    return json.dumps(asdict(fields))
