"""Admission control.

A bounded number of running requests, a bounded queue that is fair to tenants, and refusal of the rest.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrecall.domain.errors import Overloaded
from kvrecall.domain.fairness.bound import has_room
from kvrecall.domain.fairness.fair_shares import FairShares
from kvrecall.domain.fairness.share import Share
from kvrecall.domain.limits import ServiceLimits

# Of the average time in a slot, what the last one counts for.
_NEWEST = 0.2
_MOST_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class _Waiter:
    """A request in the queue; `admitted` is done once it has a slot."""

    share: Share
    admitted: "asyncio.Future[None]"


class Admission:
    """`slots` slots with a queue of `queue` in front of them, fair to tenants by tokens.

    Of slots and of the queue no tenant holds more than its share, so that another finds room. `what`
    is what runs in them, in the plural, for messages.
    """

    def __init__(self, slots: int, queue: int, what: str, limits: ServiceLimits) -> None:
        self._limits = limits
        self._slots = slots
        self._queue = queue
        self._what = what
        self._shares = FairShares()
        self._waiting: list[_Waiter] = []
        self._running = Counter[str]()
        self._seconds = 0.0  # in a slot, on average

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return self._running.total()

    @asynccontextmanager
    async def slot(self, share: Share) -> AsyncIterator[None]:
        """Hold a slot. Raises Overloaded when there is no room, or no slot came free in time."""
        self.check_room(share)
        self._shares.enter(share)
        try:
            await self._acquire(share)
            began = time.monotonic()
            try:
                yield
            finally:
                self._release(share, time.monotonic() - began)
        finally:
            self._shares.leave(share)

    def check_room(self, share: Share) -> None:
        """Raise Overloaded if the tenant has no room now, neither in a slot nor in the queue."""
        if self._may_run(share) or self._may_wait(share):
            return
        tenant = share.tenant
        waiting = sum(waiter.share.tenant == tenant for waiter in self._waiting)
        message = (
            f"{self._running[tenant]} {self._what} run and {waiting} wait, which is the limit"
            if self.running == self._running[tenant]
            else f"{self.running} {self._what} run and {self.waiting} wait, "
            f"{self._running[tenant]} and {waiting} of them of this tenant, which is its share"
        )
        raise Overloaded(f"{message}; try again later", self._estimate_wait(share))

    def charge(self, share: Share, tokens: float) -> None:
        """Charge service to whom it was given, in prefilled tokens."""
        self._shares.charge([(share, tokens)])

    async def _acquire(self, share: Share) -> None:
        """Wait for a slot. Raises Overloaded."""
        waiter = _Waiter(share, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._admit()
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await waiter.admitted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.admitted.cancelled():  # the wait ended just as it got a slot
                self._free(share)
            if not isinstance(error, TimeoutError):
                raise
            seconds = self._limits.queue_seconds
            message = f"no slot came free within {seconds:g} seconds; try again later"
            raise Overloaded(message, self._estimate_wait(share)) from error

    def _admit(self) -> None:
        """Give free slots to those that wait, in the fair order, as far as each may have one."""
        while waiting := [each for each in self._waiting if self._may_run(each.share)]:
            waiter = min(waiting, key=lambda each: self._shares.rank(each.share))
            self._waiting.remove(waiter)
            if not waiter.admitted.done():  # else its request has just ended
                self._running[waiter.share.tenant] += 1
                waiter.admitted.set_result(None)

    def _release(self, share: Share, seconds: float) -> None:
        newest = _NEWEST if self._seconds else 1.0
        self._seconds += newest * (seconds - self._seconds)
        self._free(share)

    def _free(self, share: Share) -> None:
        self._running[share.tenant] -= 1
        self._running += Counter()  # drops those at zero
        self._admit()

    def _may_run(self, share: Share) -> bool:
        held = self._running[share.tenant]
        return has_room(held, self.running, self._slots, self._limits.tenant_share, share.weight)

    def _may_wait(self, share: Share) -> bool:
        held = sum(waiter.share.tenant == share.tenant for waiter in self._waiting)
        return has_room(held, self.waiting, self._queue, self._limits.tenant_share, share.weight)

    def _estimate_wait(self, share: Share) -> float:
        """Seconds until what the tenant has waiting now will have got slots, at the present rate.

        Tenants that run or wait share the slots by their weights.
        """
        waiting = [waiter.share for waiter in self._waiting]
        weights = dict.fromkeys(self._running, 1.0)
        weights |= {each.tenant: each.weight for each in (*waiting, share)}
        slots = max(1.0, self._slots * share.weight / sum(weights.values()))
        ahead = 1 + sum(each.tenant == share.tenant for each in waiting)
        seconds = self._seconds * ahead / slots
        return min(_MOST_SECONDS, max(self._limits.retry_after_seconds, seconds))
