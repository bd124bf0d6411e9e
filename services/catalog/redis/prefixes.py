"""What sessions said first, in the Redis catalog: one entry per digest, which counts as long as its owner is there."""

from contextlib import suppress
from urllib.parse import quote, unquote

from kvrecall.domain.errors import CatalogError
from services.catalog.base import KnownPrefix
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.sessions import RedisSessions
from services.catalog.serialization import token_bytes, token_values


class RedisPrefixes:
    """Raises CatalogError."""

    def __init__(self, link: CatalogRedis, keys: Keys, sessions: RedisSessions) -> None:
        self._link = link
        self._keys = keys
        self._sessions = sessions

    async def read(self, digest: str) -> KnownPrefix | None:
        """What a session with this digest said first, if it is there."""
        found = await self._found(digest)
        if found is None:
            return None
        prefix = _value(found)
        if not (await self._sessions.exist([prefix.owner]))[0]:
            await self._drop(digest, found)
            return None
        return prefix

    async def offer(self, digest: str, prefix: KnownPrefix) -> None:
        """Let others share a session's first tokens, unless they share another's already.

        The commit that says so stands, even if this comes to nothing.
        """
        with suppress(CatalogError):
            if await self.read(digest) is None:
                name = self._keys.prefix(digest)
                await self._link.write(
                    name, "EVAL", scripts.REPLACE_IF, 1, name, _entry(prefix), "", ""
                )

    async def drop(self, digest: str, owner: str) -> None:
        """Forget what a deleted session said."""
        found = await self._found(digest) if digest else None
        if found is not None and _value(found).owner == owner:
            await self._drop(digest, found)

    async def _found(self, digest: str) -> bytes | None:
        name = self._keys.prefix(digest)
        found: bytes | None = await self._link.ask(name, "GET", name)
        return found

    async def _drop(self, digest: str, found: bytes) -> None:
        name = self._keys.prefix(digest)
        await self._link.write(name, "EVAL", scripts.DROP_IF, 1, name, found)


def _entry(prefix: KnownPrefix) -> bytes:
    return quote(prefix.owner).encode() + b"\n" + token_bytes(prefix.token_ids)


def _value(entry: bytes) -> KnownPrefix:
    owner, _, tokens = entry.partition(b"\n")
    return KnownPrefix(unquote(owner.decode()), token_values(tokens))
