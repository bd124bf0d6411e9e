"""Answers that are given again, in the Redis catalog; each for a day."""

import json

from kvrecall.domain.errors import CatalogError, IdempotencyConflict
from services.catalog.base import IdempotencyKey, IdempotencyRecord
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys


class RedisIdempotency:
    """Answers of requests that make a session, and reading of all.

    Those of other requests are written by the commit itself, in the session's slot.
    """

    MILLISECONDS = 24 * 3600 * 1000

    def __init__(self, link: CatalogRedis, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    @staticmethod
    def text(answer: IdempotencyRecord, made: str) -> str:
        """How an answer is kept; `made` is the session that its request made (empty: none)."""
        return json.dumps([made, answer.key.fingerprint, answer.answer])

    async def promise(self, answer: IdempotencyRecord | None, made: str) -> None:
        """Remember the answer of a request before it makes the session, without which the answer does not count.

        Raises CatalogError when there is one that counts.
        """
        if answer is None:
            return
        name = self._keys.answer(answer.key)
        text = self.text(answer, made)
        found = await self._replace(name, text, "")
        if found != text and not await self._counts(found):
            found = await self._replace(name, text, found)
        if found != text:
            raise CatalogError("the request was answered already; ask for its answer")

    async def recall(self, key: IdempotencyKey) -> str | None:
        """See `Catalog.recall`."""
        name = self._keys.answer(key)
        found: bytes | None = await self._link.ask(name, "GET", name)
        if found is None or not await self._counts(found.decode()):
            return None
        _, fingerprint, answer = json.loads(found)
        if fingerprint != key.fingerprint:
            raise IdempotencyConflict(key.key)
        return str(answer)

    async def _counts(self, text: str) -> bool:
        made = json.loads(text)[0]
        meta = self._keys.meta(made)
        return not made or bool(await self._link.ask(meta, "EXISTS", meta))

    async def _replace(self, name: str, text: str, old: str) -> str:
        call = ("EVAL", scripts.REPLACE_IF, 1, name, text, old, self.MILLISECONDS)
        return bytes(await self._link.write(name, *call)).decode()
