"""Deletion of sessions in the Redis catalog.

A deletion spans several slots. It first notes the session as deleted, then deletes it in its slot,
then cleans up elsewhere. One that breaks off is finished by any later one, or by a look for dead
pages, that meets its note.
"""

from contextlib import suppress
from secrets import token_hex

from kvrecall.domain.errors import CatalogError, UnknownSession
from services.catalog.records import IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import META, Keys
from services.catalog.redis.connection.shared import Command
from services.catalog.redis.expiry import RedisExpiry, decode_member, encode_member
from services.catalog.redis.idempotency import RedisIdempotency
from services.catalog.redis.indexes.indexes import RedisIndexes
from services.catalog.redis.indexes.page_tree import RedisPageTree
from services.catalog.redis.slot.slot import SessionSlots, require_own_slot

# The number of random notes that are checked for unfinished work at once.
_NOTES_CHECKED = 16


class SessionDeletion:
    """Deletes sessions. Raises UnknownSession, CatalogError."""

    def __init__(
        self,
        redis: CatalogRedis,
        keys: Keys,
        slots: SessionSlots,
        indexes: RedisIndexes,
        expiry: RedisExpiry,
        tree: RedisPageTree,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots
        self._indexes = indexes
        self._expiry = expiry
        self._tree = tree

    async def delete(self, session_id: str, record: IdempotencyRecord | None) -> None:
        """Delete a session."""
        exists, tenant = await self._slots.read(session_id, ("HGET", META, "tenant"))
        if not exists:
            raise UnknownSession(session_id)
        # Noted first: what is not finished here is found by its note.
        note = encode_member(session_id, tenant.decode())
        await self._redis.write(
            self._keys.deleted, "EVAL", scripts.ADD_MEMBERS, 1, self._keys.deleted, note
        )
        await self._delete_in_slot(session_id, record)
        with suppress(CatalogError):  # the session is deleted; the rest is done later
            await self._finish(note)
            await self.finish_some()

    async def finish_some(self) -> None:
        """Finish some of the deletions that broke off, if there are any."""
        name = self._keys.deleted
        found = await self._redis.read(name, "SRANDMEMBER", name, _NOTES_CHECKED)
        notes = [note.decode() for note in found]
        exist = await self._slots.exist([decode_member(note)[0] for note in notes])
        for note, exists in zip(notes, exist, strict=True):
            if not exists:
                await self._finish(note)

    async def _delete_in_slot(self, session_id: str, record: IdempotencyRecord | None) -> None:
        keys = [*self._keys.get_session_keys(session_id), self._keys.get_claim(session_id)]
        text = ""
        if record is not None:
            require_own_slot(record, session_id)
            keys.append(self._keys.get_record(record.key))
            text = RedisIdempotency.encode(record, created="")
        words: Command = (token_hex(8), RedisIdempotency.MILLISECONDS, text)
        call: Command = ("EVAL", scripts.DELETE_SESSION, len(keys), *keys, *words)
        outcome = await self._redis.write(keys[META], *call)
        if outcome == b"unknown":
            raise UnknownSession(session_id)
        if outcome == b"changed":
            raise CatalogError("the request was answered already; ask for its answer")

    async def _finish(self, note: str) -> None:
        """Clean up after a deletion in other slots, and remove its note."""
        session_id, tenant = decode_member(note)
        await self._indexes.remove(session_id, tenant)
        await self._expiry.remove(session_id, tenant)
        await self._tree.drop(session_id)
        await self._redis.write(self._keys.deleted, "SREM", self._keys.deleted, note)
