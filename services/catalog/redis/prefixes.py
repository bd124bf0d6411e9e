"""Prefixes that sessions offer to others, by digest, in the Redis catalog."""

from contextlib import suppress
from urllib.parse import quote, unquote

from kvrecall.domain.errors import CatalogError
from services.catalog.records import KnownPrefix
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.slot import SessionSlots
from services.catalog.serialization import decode_tokens, encode_tokens


class RedisPrefixes:
    """Prefixes by digest. Raises CatalogError."""

    def __init__(self, redis: CatalogRedis, keys: Keys, slots: SessionSlots) -> None:
        self._redis = redis
        self._keys = keys
        self._slots = slots

    async def get(self, digest: str) -> KnownPrefix | None:
        """Return the prefix offered under this digest; one whose owner is gone is deleted."""
        entry = await self._read(digest)
        if entry is None:
            return None
        prefix = _decode(entry)
        if not (await self._slots.exist([prefix.owner]))[0]:
            await self._delete_if_equal(digest, entry)
            return None
        return prefix

    async def offer(self, digest: str, prefix: KnownPrefix) -> None:
        """Offer a session's first tokens, unless another session has offered some already.

        The commit of the session's turn stands even if this fails.
        """
        with suppress(CatalogError):
            if await self.get(digest) is None:
                name = self._keys.get_prefix(digest)
                call = ("EVAL", scripts.SET_IF_EQUAL, 1, name, _encode(prefix), "", "")
                await self._redis.write(name, *call)

    async def delete(self, digest: str, owner: str) -> None:
        """Delete the prefix of a deleted session, if it offered the one under this digest."""
        entry = await self._read(digest) if digest else None
        if entry is not None and _decode(entry).owner == owner:
            await self._delete_if_equal(digest, entry)

    async def _read(self, digest: str) -> bytes | None:
        name = self._keys.get_prefix(digest)
        entry: bytes | None = await self._redis.read(name, "GET", name)
        return entry

    async def _delete_if_equal(self, digest: str, entry: bytes) -> None:
        name = self._keys.get_prefix(digest)
        await self._redis.write(name, "EVAL", scripts.DELETE_IF_EQUAL, 1, name, entry)


def _encode(prefix: KnownPrefix) -> bytes:
    first_line = f"{quote(prefix.owner)} {prefix.epoch}\n"
    return first_line.encode() + encode_tokens(prefix.token_ids)


def _decode(entry: bytes) -> KnownPrefix:
    first_line, _, tokens = entry.partition(b"\n")
    owner, _, epoch = first_line.decode().partition(" ")
    return KnownPrefix(unquote(owner), decode_tokens(tokens), int(epoch))
