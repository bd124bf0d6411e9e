"""Conversations that clients name by an id: their items, and one writer at a time."""

import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b

from pydantic import TypeAdapter

from kvrecall.domain.errors import CatalogError, DataKeyDeleted, UnknownItem
from kvrecall.domain.limits import ServiceLimits
from services.access.quotas import Quotas
from services.catalog.base import Catalog
from services.catalog.records import IdempotencyKey, IdempotencyRecord
from services.catalog.responses import (
    ItemBounds,
    StoredConversation,
    StoredConversations,
    StoredItem,
    measure,
)
from services.conversations.responses import AnswerClaim

_IDS = TypeAdapter(list[str])


class NamedConversations:
    """Conversations of each tenant. Raises UnknownConversation, UnknownItem.

    Another tenant's conversation is unknown.
    """

    def __init__(self, catalog: Catalog, quotas: Quotas, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._quotas = quotas
        self._limits = limits
        self._bounds = ItemBounds(limits.max_conversation_items, limits.max_conversation_bytes)

    @property
    def _store(self) -> StoredConversations:
        return self._catalog.conversations

    async def create(
        self,
        tenant: str,
        metadata: Mapping[str, str],
        items: Sequence[StoredItem],
        key: IdempotencyKey | None = None,
    ) -> StoredConversation:
        """Create a conversation with its first items, or return the one that the key's request has.

        Raises QuotaExceeded, LimitExceeded, IdempotencyConflict.
        """
        self._quotas.check_metadata(metadata)
        self._bounds.check(len(items), measure(items))
        id = self._name(key)
        created = StoredConversation(id, tenant, int(time.time()), dict(metadata))
        record = None if key is None else IdempotencyRecord(replace(key, session=id), "{}")
        is_new = await self._quotas.keep_within(
            tenant, lambda limits: self._store.create(created, items, record, limits)
        )
        if record is None or is_new:
            return created
        await self._catalog.idempotency.get(record.key)  # it was made for the same body
        return await self.get(id, tenant)

    def _name(self, key: IdempotencyKey | None) -> str:
        """Return a random id, or the one that all requests with a key have in this catalog."""
        if key is None:
            return f"conv_{secrets.token_hex(16)}"
        secret = self._catalog.id.encode()
        digest = blake2b(f"{key.scope} {key.key}".encode(), digest_size=16, key=secret)
        return f"conv_{digest.hexdigest()}"

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a conversation."""
        return await self._store.get(conversation_id, tenant)

    async def update(
        self, conversation_id: str, tenant: str, metadata: Mapping[str, str]
    ) -> StoredConversation:
        """Replace the metadata. Raises LimitExceeded."""
        await self.get(conversation_id, tenant)
        self._quotas.check_metadata(metadata)
        await self._store.update(conversation_id, metadata)
        return await self.get(conversation_id, tenant)

    async def delete(self, conversation_id: str, tenant: str) -> None:
        """Delete a conversation; the sessions and responses of its answers stay."""
        with suppress(DataKeyDeleted):  # it is deleted though it cannot be decrypted
            await self.get(conversation_id, tenant)
        await self._store.delete(conversation_id)

    async def add_items(
        self,
        conversation_id: str,
        tenant: str,
        items: Sequence[StoredItem],
        key: IdempotencyKey | None = None,
    ) -> Sequence[StoredItem]:
        """Append items whose ids are new; return them, or what is left of the key's first request.

        Its record has the items' ids alone, as no quota counts records. Raises
        LimitExceeded, QuotaExceeded, IdempotencyConflict.
        """
        await self.get(conversation_id, tenant)
        record = None
        if key is not None:
            key = replace(key, session=conversation_id)
            record = IdempotencyRecord(key, _IDS.dump_json([item.id for item in items]).decode())
        try:
            await self._quotas.keep_within(
                tenant,
                lambda limits: self._store.add_items(
                    conversation_id, items, self._bounds, record, limits
                ),
            )
        except CatalogError:
            answered = None if key is None else await self._catalog.idempotency.get(key)
            if answered is None:
                raise
            return await self._read_items(conversation_id, _IDS.validate_json(answered))
        return items

    async def _read_items(self, conversation_id: str, ids: Sequence[str]) -> list[StoredItem]:
        """Return the items of these ids, without those that were deleted."""
        found = []
        for id in ids:
            with suppress(UnknownItem):
                found.append(await self._store.get_item(conversation_id, id))
        return found

    async def add_answer(self, conversation_id: str, items: Sequence[StoredItem]) -> None:
        """Append what an answer brought; one that was begun is added whatever the bounds."""
        await self._store.add_items(conversation_id, items, None)

    async def get_items(
        self,
        conversation_id: str,
        tenant: str,
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> list[StoredItem]:
        """Return items that follow the item `after` in this order."""
        await self.get(conversation_id, tenant)
        return await self._store.get_items(conversation_id, after, limit, newest_first)

    async def get_all(
        self, conversation_id: str, tenant: str, added: Sequence[StoredItem]
    ) -> list[StoredItem]:
        """Return all items in order, to which an answer to `added` is going to be appended.

        Raises LimitExceeded if there is no room for it.
        """
        await self.get(conversation_id, tenant)
        items = await self._store.get_all(conversation_id, self._bounds)
        count = len(items) + len(added) + 1
        self._bounds.check(count, measure(items) + measure(added), "conversation")
        return items

    async def get_item(self, conversation_id: str, tenant: str, item_id: str) -> StoredItem:
        """Return an item."""
        await self.get(conversation_id, tenant)
        return await self._store.get_item(conversation_id, item_id)

    async def delete_item(self, conversation_id: str, tenant: str, item_id: str) -> None:
        """Delete an item: the next answer is that of a conversation without it."""
        await self.get(conversation_id, tenant)
        await self._store.delete_item(conversation_id, item_id)

    async def claim(self, conversation_id: str, tenant: str) -> AnswerClaim:
        """Become the writer, after a wait of up to `queue_seconds`. Raises SessionBusy."""
        await self.get(conversation_id, tenant)
        claim = AnswerClaim(self._store, conversation_id, self._limits.claim_seconds)
        await claim.acquire(self._limits.queue_seconds)
        return claim
