"""Admission control.

A bounded number of running requests, a bounded queue, and refusal of the rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrecall.domain.errors import Overloaded
from kvrecall.domain.limits import ServiceLimits


class Admission:
    """`slots` slots with a queue of `queue` in front of them, first come, first served.

    `what` is what runs in them, in the plural, for messages.
    """

    def __init__(self, slots: int, queue: int, what: str, limits: ServiceLimits) -> None:
        self._limits = limits
        self._queue = queue
        self._what = what
        self._slots = asyncio.Semaphore(slots)
        self.waiting = 0
        self.running = 0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot. Raises Overloaded when the queue is full, or no slot came free in time."""
        await self._acquire()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()

    def check_room(self) -> None:
        """Raise Overloaded if there is no room in the queue now."""
        if self._slots.locked() and self.waiting >= self._queue:
            raise Overloaded(
                f"{self.running} {self._what} run and {self.waiting} wait, which is the limit; "
                "try again later",
                self._limits.retry_after_seconds,
            )

    async def _acquire(self) -> None:
        limits = self._limits
        self.check_room()
        self.waiting += 1
        try:
            async with asyncio.timeout(limits.queue_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            message = f"no slot came free within {limits.queue_seconds:g} seconds; try again later"
            raise Overloaded(message, limits.retry_after_seconds) from error
        finally:
            self.waiting -= 1
