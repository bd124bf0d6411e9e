"""Conversations that clients name by an id: their items, and one writer at a time."""

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence

from kvrecall.domain.errors import QuotaExceeded, ServiceError, SessionBusy
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog
from services.catalog.responses.base import (
    ItemBounds,
    StoredConversation,
    StoredConversations,
    StoredItem,
    measure,
)
from services.quotas import Quotas

_RENEWALS_PER_CLAIM = 3
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2


class ConversationClaim:
    """The right to add the next answer to a conversation, kept until it is released.

    It puts answers in order. Should it be lost to another process, answers are added in the order
    in which they end, and none is lost.
    """

    def __init__(self, store: StoredConversations, conversation: str, seconds: float) -> None:
        self._store = store
        self._conversation = conversation
        self._seconds = seconds
        self._holder = secrets.token_hex(8)
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self, patience: float) -> None:
        """Wait for up to `patience` seconds. Raises SessionBusy."""
        until = time.monotonic() + patience
        pause = _FIRST_PAUSE_SECONDS
        while not await self._claim():
            if time.monotonic() + pause > until:
                raise SessionBusy(
                    f"conversation {self._conversation!r} is in the middle of an answer; "
                    "try again later"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._renewing = asyncio.create_task(self._renew(), name="conversation claim")

    async def release(self) -> None:
        """Let the next one write."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait({self._renewing})
        self._renewing = None
        try:
            await self._store.release(self._conversation, self._holder)
        except ServiceError:
            return  # it expires soon

    async def _claim(self) -> bool:
        return await self._store.claim(self._conversation, self._holder, self._seconds)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS_PER_CLAIM)
            try:
                await self._claim()
            except ServiceError:
                continue  # the catalog is unreachable


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
        self, tenant: str, metadata: Mapping[str, str], items: Sequence[StoredItem]
    ) -> StoredConversation:
        """Create a conversation with its first items. Raises QuotaExceeded, LimitExceeded."""
        self._quotas.check_metadata(metadata)
        self._bounds.check(len(items), measure(items))
        limit = self._limits.tenant_conversations
        if await self._store.count(tenant) >= limit:
            message = f"the tenant has {limit} conversations, which is the limit: delete some"
            raise QuotaExceeded(message, limit)
        id = f"conv_{secrets.token_hex(16)}"
        created = StoredConversation(id, tenant, int(time.time()), dict(metadata))
        await self._store.create(created, items)
        return created

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
        await self.get(conversation_id, tenant)
        await self._store.delete(conversation_id)

    async def add_items(
        self, conversation_id: str, tenant: str, items: Sequence[StoredItem]
    ) -> None:
        """Append items whose ids are new. Raises LimitExceeded."""
        await self.get(conversation_id, tenant)
        await self._store.add_items(conversation_id, items, self._bounds)

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

    async def claim(self, conversation_id: str, tenant: str) -> ConversationClaim:
        """Become the writer, after a wait of up to `queue_seconds`. Raises SessionBusy."""
        await self.get(conversation_id, tenant)
        claim = ConversationClaim(self._store, conversation_id, self._limits.claim_seconds)
        await claim.acquire(self._limits.queue_seconds)
        return claim
