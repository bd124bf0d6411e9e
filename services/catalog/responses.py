"""Responses and conversations of OpenAI's API as a catalog stores them, and its interface.

The services that write them know their form: `body` is JSON text that a catalog does not read. What
a method has returned from survives a crash. All methods raise CatalogError when the storage fails.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrecall.domain.errors import LimitExceeded
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord


@dataclass(frozen=True)
class StoredResponse:
    """The answer of turn `turn` of `session`, without its input: the session's turns have that.

    `opening` is the digest of all that comes before the first item of the conversation, followed by
    `@` and the id of its catalog where that is another one than this; of it `hidden` messages are
    in the session's first turn. `history` is the digest of the conversation up to the end of the
    turn. A response goes with its session.
    """

    id: str
    tenant: str
    session: str
    turn: int
    opening: str
    history: str
    hidden: int
    body: str


@dataclass(frozen=True)
class StoredConversation:
    """A conversation without its items. `created_at` is in Unix seconds."""

    id: str
    tenant: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredItem:
    """An item of a conversation, under an id that is unique in it."""

    id: str
    body: str


@dataclass(frozen=True)
class ItemBounds:
    """The most items that a conversation may have, and the most UTF-8 bytes of all their bodies."""

    items: int
    bytes: int

    def check(self, items: int, size: int, field: str = "items") -> None:
        """Raise LimitExceeded for a conversation of so many items and bytes; `field` is at fault."""
        if items > self.items:
            message = f"a conversation has at most {self.items} items; this would have {items}"
            raise LimitExceeded(field, message, self.items)
        if size > self.bytes:
            message = f"a conversation has at most {self.bytes} bytes; this would have {size}"
            raise LimitExceeded(field, message, self.bytes)


def measure(items: Iterable[StoredItem]) -> int:
    """Return the UTF-8 bytes of the items' bodies."""
    return sum(len(item.body.encode()) for item in items)


def name_origin(opening: str, catalog: str) -> str:
    """Return an opening as another catalog than `catalog`, whose digest it is, would have it."""
    return opening if "@" in opening else f"{opening}@{catalog}"


def drop_origin(opening: str, catalog: str) -> str:
    """Return an opening as the catalog of this id has it."""
    return opening.removesuffix(f"@{catalog}")


class Responses(Protocol):
    """Responses by their ids."""

    async def store(
        self, response: StoredResponse, seconds: float, limits: TenantLimits = UNLIMITED
    ) -> None:
        """Store a response for so long; one of the same id is replaced.

        Deletes some of those that have expired: it costs no more than they did. Raises
        UnknownSession, and QuotaExceeded if the tenant would be over its limits.
        """
        ...

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a tenant's response.

        Raises UnknownResponse, also when it expired or its session is gone. One of another tenant
        is read no more than one that does not exist, so that the two cannot be distinguished.
        """
        ...

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response; its turn stays. Raises UnknownResponse."""
        ...


class StoredConversations(Protocol):
    """Conversations that clients name by an id, each with its items in order.

    The idempotency record of a request names the conversation in place of a session, one that is
    created too.
    """

    async def create(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> bool:
        """Add a conversation with its first items; False if there is one of that id already.

        Raises QuotaExceeded if its tenant would be over its limits by it.
        """
        ...

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a tenant's conversation. Raises UnknownConversation.

        One of another tenant is read no more than one that does not exist.
        """
        ...

    async def update(self, conversation_id: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata. Raises UnknownConversation."""
        ...

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises UnknownConversation."""
        ...

    async def add_items(
        self,
        conversation_id: str,
        items: Sequence[StoredItem],
        bounds: ItemBounds | None,
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> None:
        """Append items; one whose id is there already is left out, so a call may be repeated.

        Raises UnknownConversation, CatalogError if the request of the `record` was answered already,
        LimitExceeded if the conversation would be over `bounds`, and QuotaExceeded if its tenant
        would be over its limits: then none is added.
        """
        ...

    async def get_items(
        self, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredItem]:
        """Return up to `limit` items that follow the item `after` in this order.

        Raises UnknownConversation, UnknownItem for `after`.
        """
        ...

    async def get_all(self, conversation_id: str, bounds: ItemBounds) -> list[StoredItem]:
        """Return all items in order.

        Raises UnknownConversation, and LimitExceeded with the field `conversation` if they are over
        `bounds`: then no body is read.
        """
        ...

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem:
        """Return an item. Raises UnknownItem."""
        ...

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Delete an item. Raises UnknownItem."""
        ...

    async def claim(self, conversation_id: str, holder: str, seconds: float) -> bool:
        """Claim the conversation for `seconds` from now, or extend the holder's own claim.

        Returns False while another holder's claim lasts. A claim only puts answers in order.
        """
        ...

    async def release(self, conversation_id: str, holder: str) -> None:
        """Release a claim; another holder's claim is left alone."""
        ...
