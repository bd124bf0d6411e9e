"""Responses and conversations of the in-memory catalog."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvrecall.domain.errors import SessionBusy, UnknownConversation, UnknownItem, UnknownResponse
from kvrecall.testing._catalog_state import CatalogState
from services.catalog.claims import Claims
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.responses.base import (
    ItemBounds,
    StoredConversation,
    StoredItem,
    StoredResponse,
    measure,
)


class InMemoryResponses:
    """Responses by their ids, each with the time at which it expires."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state

    async def store(
        self, response: StoredResponse, seconds: float, limits: TenantLimits = UNLIMITED
    ) -> None:
        """Store a response for so long. Raises UnknownSession, QuotaExceeded."""
        self._state.get(response.session)
        known, _ = self._state.responses.get(response.id, (None, 0.0))
        before = 0 if known is None else len(known.body.encode())
        size = len(response.body.encode()) - before
        self._state.require_room(response.tenant, limits, bytes=size)
        self._state.responses[response.id] = (response, time.monotonic() + seconds)

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a tenant's response. Raises UnknownResponse."""
        response, until = self._state.responses.get(response_id, (None, 0.0))
        if (
            response is None
            or response.tenant != tenant
            or until <= time.monotonic()
            or response.session not in self._state.sessions
        ):
            raise UnknownResponse(response_id)
        return response

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response. Raises UnknownResponse."""
        await self.get(response_id, tenant)
        del self._state.responses[response_id]


class InMemoryConversations:
    """Conversations, and the items of each by id, in order."""

    def __init__(self, state: CatalogState) -> None:
        self._state = state
        self._claims = Claims()

    async def create(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> bool:
        """Add a conversation; False if there is one of that id already. Raises QuotaExceeded."""
        if conversation.id in self._state.conversations:
            return False
        size = measure(items)
        self._state.require_room(conversation.tenant, limits, conversations=1, bytes=size)
        self._state.store_record(record)
        self._state.conversations[conversation.id] = conversation
        self._state.items[conversation.id] = {item.id: item for item in items}
        return True

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a tenant's conversation. Raises UnknownConversation."""
        found = self._get(conversation_id)
        if found.tenant != tenant:
            raise UnknownConversation(conversation_id)
        return found

    def _get(self, conversation_id: str) -> StoredConversation:
        if conversation_id not in self._state.conversations:
            raise UnknownConversation(conversation_id)
        return self._state.conversations[conversation_id]

    async def update(self, conversation_id: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata. Raises UnknownConversation."""
        found = self._get(conversation_id)
        self._state.conversations[conversation_id] = replace(found, metadata=dict(metadata))

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises UnknownConversation."""
        self._get(conversation_id)
        del self._state.conversations[conversation_id]
        del self._state.items[conversation_id]

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
        tenant = self._get(conversation_id).tenant
        self._state.require_new_record(record)
        known = self._state.items[conversation_id]
        added = known | {item.id: item for item in items if item.id not in known}
        if bounds is not None:
            bounds.check(len(added), measure(added.values()))
        size = measure(added.values()) - measure(known.values())
        self._state.require_room(tenant, limits, bytes=size)
        self._state.items[conversation_id] = added
        self._state.store_record(record)

    async def get_items(
        self, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredItem]:
        """Return up to `limit` items. Raises UnknownConversation, UnknownItem for `after`."""
        self._get(conversation_id)
        items = list(self._state.items[conversation_id].values())
        ordered = items[::-1] if newest_first else items
        if after is None:
            return ordered[:limit]
        ids = [item.id for item in ordered]
        if after not in ids:
            raise UnknownItem(after)
        return ordered[ids.index(after) + 1 :][:limit]

    async def get_all(self, conversation_id: str, bounds: ItemBounds) -> list[StoredItem]:
        """Return all items in order. Raises UnknownConversation, LimitExceeded."""
        self._get(conversation_id)
        items = list(self._state.items[conversation_id].values())
        bounds.check(len(items), measure(items), "conversation")
        return items

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem:
        """Return an item. Raises UnknownItem."""
        items = self._state.items.get(conversation_id, {})
        if item_id not in items:
            raise UnknownItem(item_id)
        return items[item_id]

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Delete an item. Raises UnknownItem."""
        await self.get_item(conversation_id, item_id)
        del self._state.items[conversation_id][item_id]

    async def claim(self, conversation_id: str, holder: str, seconds: float) -> bool:
        """Claim the conversation, or extend the holder's claim; False if another one has it."""
        try:
            self._claims.acquire(conversation_id, holder, seconds)
        except SessionBusy:
            return False
        return True

    async def release(self, conversation_id: str, holder: str) -> None:
        """Release the holder's claim."""
        self._claims.release(conversation_id, holder)
