"""The claim of one process on an answer that it computes."""

import asyncio
import secrets
import time

from kvrecall.domain.errors import ServiceError, SessionBusy
from services.catalog.responses import StoredConversations

_RENEWALS_PER_CLAIM = 3
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2


class AnswerClaim:
    """The right to compute the answer of a response or of a conversation, kept until it is released.

    It puts a conversation's answers in order. Should it be lost to another process, answers are
    added in the order in which they end, and none is lost.
    """

    def __init__(self, store: StoredConversations, id: str, seconds: float) -> None:
        self._store = store
        self._id = id
        self._seconds = seconds
        self._holder = secrets.token_hex(8)
        self._renewing: asyncio.Task[None] | None = None

    async def acquire(self, patience: float) -> None:
        """Wait for up to `patience` seconds. Raises SessionBusy."""
        until = time.monotonic() + patience
        pause = _FIRST_PAUSE_SECONDS
        while not await self._claim():
            if time.monotonic() + pause > until:
                raise SessionBusy(f"{self._id!r} is in the middle of an answer; try again later")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._renewing = asyncio.create_task(self._renew(), name="answer claim")

    async def release(self) -> None:
        """Let the next answer begin."""
        if self._renewing is None:
            return
        self._renewing.cancel()
        await asyncio.wait({self._renewing})
        self._renewing = None
        try:
            await self._store.release(self._id, self._holder)
        except ServiceError:
            return  # it expires soon

    async def _claim(self) -> bool:
        return await self._store.claim(self._id, self._holder, self._seconds)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / _RENEWALS_PER_CLAIM)
            try:
                await self._claim()
            except ServiceError:
                continue  # the catalog is unreachable
