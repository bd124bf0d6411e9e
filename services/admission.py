"""Admission control.

A bounded number of running turns, a bounded queue, and refusal of the rest.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrecall.domain.errors import Overloaded
from kvrecall.domain.limits import ServiceLimits


class Admission:
    """A bounded number of turn slots with a bounded queue in front of them, first come, first served."""

    def __init__(self, settings: ServiceLimits) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.max_running_turns)
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

    async def _acquire(self) -> None:
        settings = self._settings
        if self._slots.locked() and self.waiting >= settings.max_waiting_turns:
            raise Overloaded(
                f"{self.running} turns run and {self.waiting} wait, which is the limit; try again later",
                settings.retry_after_seconds,
            )
        self.waiting += 1
        try:
            async with asyncio.timeout(settings.queue_seconds):
                await self._slots.acquire()
        except TimeoutError as error:
            message = (
                f"no slot came free within {settings.queue_seconds:g} seconds; try again later"
            )
            raise Overloaded(message, settings.retry_after_seconds) from error
        finally:
            self.waiting -= 1
