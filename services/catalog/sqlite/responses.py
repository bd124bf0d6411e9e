"""Responses and conversations in the SQLite catalog."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from kvrecall.domain.errors import (
    SessionBusy,
    UnknownConversation,
    UnknownItem,
    UnknownResponse,
)
from services.catalog.claims import Claims
from services.catalog.encryption.cipher import OVERHEAD_BYTES, Cipher
from services.catalog.encryption.encryption import Encryption
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.responses import (
    ItemBounds,
    StoredConversation,
    StoredItem,
    StoredResponse,
)
from services.catalog.sqlite.idempotency import SqliteIdempotency
from services.catalog.sqlite.storage.database import Database
from services.catalog.sqlite.storage.queries import (
    Row,
    check_use,
    fetch_all,
    fetch_one,
    insert,
    require_session,
)

# The number of expired responses that one stored response deletes.
_EXPIRED_AT_ONCE = 64
_DELETE_EXPIRED = """
DELETE FROM responses WHERE id IN
(SELECT id FROM responses WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit)
"""
_COLUMNS = ", ".join(each.name for each in fields(StoredResponse))
# Those of StoredResponse that are encrypted.
_TEXTS = ("opening", "history", "body")
_OF_TENANT = "WHERE id = :id AND tenant = :tenant AND expires_at > :now"
_OF_ITEM = "WHERE conversation = :conversation AND id = :id"


class SqliteResponses:
    """Responses by their ids; they go with their sessions."""

    def __init__(self, database: Database, encryption: Encryption) -> None:
        self._database = database
        self._ciphers = encryption.tenants

    async def store(
        self, response: StoredResponse, seconds: float, limits: TenantLimits = UNLIMITED
    ) -> None:
        """Store a response for so long, and delete some that have expired.

        Raises UnknownSession, QuotaExceeded.
        """
        now = self._database.now()
        cipher = await self._ciphers.to_write(response.tenant)
        texts = {
            name: cipher.seal_text(getattr(response, name), f"responses.{name} {response.id}")
            for name in _TEXTS
        }
        row = {**asdict(response), **texts, "expires_at": now + seconds}

        def change(db: sqlite3.Connection) -> None:
            require_session(db, response.session)
            db.execute("DELETE FROM responses WHERE id = :id", {"id": response.id})
            insert(db, "responses", [row])
            db.execute(_DELETE_EXPIRED, {"now": now, "limit": _EXPIRED_AT_ONCE})
            check_use(db, response.tenant, limits, "bytes")

        await self._database.write(change, "")

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        """Return a tenant's response that has not expired. Raises UnknownResponse."""
        query = f"SELECT {_COLUMNS} FROM responses {_OF_TENANT}"
        values = {"id": response_id, "tenant": tenant, "now": self._database.now()}
        row = await self._database.read(lambda db: fetch_one(db, query, values))
        if row is None:
            raise UnknownResponse(response_id)
        cipher = await self._ciphers.to_read(tenant)
        texts = {
            name: cipher.open_text(row[name], f"responses.{name} {response_id}") for name in _TEXTS
        }
        return StoredResponse(**{**dict(row), **texts})

    async def delete(self, response_id: str, tenant: str) -> None:
        """Delete a tenant's response. Raises UnknownResponse."""
        query = f"DELETE FROM responses {_OF_TENANT}"
        values = {"id": response_id, "tenant": tenant, "now": self._database.now()}
        if not await _change(self._database, query, values):
            raise UnknownResponse(response_id)


class SqliteConversations:
    """Conversations and their items; claims are in memory, as one process uses the file."""

    def __init__(
        self, database: Database, idempotency: SqliteIdempotency, encryption: Encryption
    ) -> None:
        self._database = database
        self._idempotency = idempotency
        self._encryption = encryption
        self._claims = Claims()

    async def create(
        self,
        conversation: StoredConversation,
        items: Sequence[StoredItem],
        record: IdempotencyRecord | None = None,
        limits: TenantLimits = UNLIMITED,
    ) -> bool:
        """Add a conversation; False if there is one of that id already. Raises QuotaExceeded."""
        cipher = await self._encryption.tenants.to_write(conversation.tenant)
        sealed = await self._idempotency.seal(record)
        metadata = _seal_metadata(conversation.id, conversation.metadata, cipher)
        row = {**asdict(conversation), "metadata": metadata}

        def change(db: sqlite3.Connection) -> bool:
            if _exists(db, conversation.id):
                return False
            insert(db, "conversations", [row])
            _add_items(db, conversation.id, items, cipher)
            self._idempotency.replace(db, sealed)
            check_use(db, conversation.tenant, limits, "conversations", "bytes")
            return True

        return await self._database.write(change, "")

    async def get(self, conversation_id: str, tenant: str) -> StoredConversation:
        """Return a tenant's conversation. Raises UnknownConversation."""
        query = "SELECT * FROM conversations WHERE id = :id AND tenant = :tenant"
        values = {"id": conversation_id, "tenant": tenant}
        row = await self._database.read(lambda db: fetch_one(db, query, values))
        if row is None:
            raise UnknownConversation(conversation_id)
        cipher = await self._encryption.tenants.to_read(tenant)
        text = cipher.open_text(row["metadata"], f"conversations.metadata {conversation_id}")
        metadata = json.loads(text)
        return StoredConversation(row["id"], row["tenant"], row["created_at"], metadata)

    async def update(self, conversation_id: str, metadata: Mapping[str, str]) -> None:
        """Replace the metadata. Raises UnknownConversation."""
        query = "UPDATE conversations SET metadata = :metadata WHERE id = :id"
        cipher = await self._encryption.conversations.to_write(conversation_id)
        sealed = _seal_metadata(conversation_id, metadata, cipher)
        values = {"id": conversation_id, "metadata": sealed}
        if not await _change(self._database, query, values, grows=True):
            raise UnknownConversation(conversation_id)

    async def delete(self, conversation_id: str) -> None:
        """Delete a conversation with its items. Raises UnknownConversation."""
        query = "DELETE FROM conversations WHERE id = :id"
        if not await _change(self._database, query, {"id": conversation_id}):
            raise UnknownConversation(conversation_id)
        self._claims.discard(conversation_id)

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
        cipher = await self._encryption.conversations.to_write(conversation_id)
        sealed = await self._idempotency.seal(record)

        def change(db: sqlite3.Connection) -> None:
            tenant = _get_tenant(db, conversation_id)
            self._idempotency.store(db, sealed)
            _add_items(db, conversation_id, items, cipher)
            if bounds is not None:
                bounds.check(*_measure(db, conversation_id))
            check_use(db, tenant, limits, "bytes")

        await self._database.write(change, "")

    async def get_items(
        self, conversation_id: str, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredItem]:
        """Return up to `limit` items. Raises UnknownConversation, UnknownItem for `after`."""
        comparison, order = ("<", "DESC") if newest_first else (">", "ASC")
        query = (
            "SELECT id, body FROM conversation_items WHERE conversation = :conversation"
            f" AND (:after IS NULL OR position {comparison} :after)"
            f" ORDER BY position {order} LIMIT :limit"
        )
        cipher = await self._encryption.conversations.to_read(conversation_id)

        def read(db: sqlite3.Connection) -> list[StoredItem]:
            _get_tenant(db, conversation_id)
            position = None
            if after is not None:
                position = _fetch_item(db, conversation_id, after)["position"]
            values = {"conversation": conversation_id, "after": position, "limit": limit}
            rows = fetch_all(db, query, values)
            return [_to_item(row, conversation_id, cipher) for row in rows]

        return await self._database.read(read)

    async def get_all(self, conversation_id: str, bounds: ItemBounds) -> list[StoredItem]:
        """Return all items in order. Raises UnknownConversation, LimitExceeded."""
        query = "SELECT id, body FROM conversation_items WHERE conversation = :id ORDER BY position"
        cipher = await self._encryption.conversations.to_read(conversation_id)

        def read(db: sqlite3.Connection) -> list[StoredItem]:
            _get_tenant(db, conversation_id)
            bounds.check(*_measure(db, conversation_id), "conversation")
            rows = fetch_all(db, query, {"id": conversation_id})
            return [_to_item(row, conversation_id, cipher) for row in rows]

        return await self._database.read(read)

    async def get_item(self, conversation_id: str, item_id: str) -> StoredItem:
        """Return an item. Raises UnknownItem."""
        row = await self._database.read(lambda db: _fetch_item(db, conversation_id, item_id))
        cipher = await self._encryption.conversations.to_read(conversation_id)
        return _to_item(row, conversation_id, cipher)

    async def delete_item(self, conversation_id: str, item_id: str) -> None:
        """Delete an item. Raises UnknownItem."""
        query = f"DELETE FROM conversation_items {_OF_ITEM}"
        values = {"conversation": conversation_id, "id": item_id}
        if not await _change(self._database, query, values):
            raise UnknownItem(item_id)

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


def _seal_metadata(conversation: str, metadata: Mapping[str, str], cipher: Cipher) -> str | bytes:
    text = json.dumps(dict(metadata))
    return cipher.seal_text(text, f"conversations.metadata {conversation}")


def _to_item(row: sqlite3.Row, conversation: str, cipher: Cipher) -> StoredItem:
    return StoredItem(row["id"], cipher.open_text(row["body"], _get_place(conversation, row["id"])))


def _get_place(conversation: str, item: str) -> str:
    return f"conversation_items.body {conversation} {item}"


def _add_items(
    db: sqlite3.Connection, conversation: str, items: Sequence[StoredItem], cipher: Cipher
) -> None:
    query = (
        "INSERT INTO conversation_items (conversation, position, id, body)"
        " SELECT :conversation, ifnull(max(position), 0) + 1, :id, :body FROM conversation_items"
        " WHERE conversation = :conversation ON CONFLICT DO NOTHING"
    )
    rows = [
        {
            "conversation": conversation,
            "id": each.id,
            "body": cipher.seal_text(each.body, _get_place(conversation, each.id)),
        }
        for each in items
    ]
    db.executemany(query, rows)


def _measure(db: sqlite3.Connection, conversation: str) -> tuple[int, int]:
    """Return the number of items of a conversation, and the bytes of their bodies."""
    # Encrypted bodies are blobs, of which only the bytes of the text count.
    query = (
        "SELECT count(*), ifnull(sum(length(CAST(body AS BLOB))"
        " - iif(typeof(body) = 'blob', :overhead, 0)), 0)"
        " FROM conversation_items WHERE conversation = :id"
    )
    row = fetch_one(db, query, {"id": conversation, "overhead": OVERHEAD_BYTES})
    return (0, 0) if row is None else (row[0], row[1])


def _exists(db: sqlite3.Connection, conversation: str) -> bool:
    query = "SELECT 1 FROM conversations WHERE id = :id"
    return fetch_one(db, query, {"id": conversation}) is not None


def _get_tenant(db: sqlite3.Connection, conversation: str) -> str:
    """Return a conversation's tenant. Raises UnknownConversation."""
    query = "SELECT tenant FROM conversations WHERE id = :id"
    row = fetch_one(db, query, {"id": conversation})
    if row is None:
        raise UnknownConversation(conversation)
    return str(row["tenant"])


def _fetch_item(db: sqlite3.Connection, conversation: str, item: str) -> sqlite3.Row:
    query = f"SELECT * FROM conversation_items {_OF_ITEM}"
    row = fetch_one(db, query, {"conversation": conversation, "id": item})
    if row is None:
        raise UnknownItem(item)
    return row


async def _change(database: Database, query: str, values: Row, *, grows: bool = False) -> int:
    """Run one statement; return the number of rows that it changed."""

    def change(db: sqlite3.Connection) -> int:
        return int(db.execute(query, values).rowcount)

    return await database.write(change, "", grows=grows)
