"""Conversations at the ends of turns, by digest, in the Redis catalog."""

from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import quote, unquote

from kvrecall.domain.errors import CatalogError
from services.catalog.encryption.encryption import Encryption
from services.catalog.records import HistoryEntry
from services.catalog.redis.connection.client import CatalogRedis
from services.catalog.redis.connection.keys import Keys

_HISTORY_SECONDS = 30 * 86_400


class RedisHistories:
    """The ends of turns by the digests of their conversations. Raises CatalogError.

    One key each, in a slot of its own. It is written after the turn's commit, which stands without
    it, and expires.
    """

    def __init__(self, redis: CatalogRedis, keys: Keys, encryption: Encryption) -> None:
        self._redis = redis
        self._keys = keys
        self._name = encryption.name_digest

    async def find(self, digests: Sequence[str]) -> list[HistoryEntry]:
        """Return the known ones of these digests, in their order."""
        names = [self._keys.get_history(self._name(digest)) for digest in digests]
        replies = await self._redis.read_values(names)
        found = []
        for digest, reply in zip(digests, replies, strict=True):
            if reply is not None:
                session, _, turn = reply.decode().partition(" ")
                found.append(HistoryEntry(digest, unquote(session), int(turn)))
        return found

    async def add(self, entry: HistoryEntry) -> None:
        """Note the end of a turn; of the same conversation in several sessions the last one counts."""
        name = self._keys.get_history(self._name(entry.digest))
        value = f"{quote(entry.session)} {entry.turn}"
        with suppress(CatalogError):
            await self._redis.write(name, "SET", name, value, "EX", _HISTORY_SECONDS)
