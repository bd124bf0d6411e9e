"""Leases on sessions, and the epochs that fence off former owners.

A lease keeps other processes from starting work in vain; it lasts for seconds and is renewed while
the work lasts. Safety never depends on its clock: every write carries an epoch, and a former
owner's epoch is refused.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from kvrecall.domain.errors import ServiceError, SessionBusy, StaleEpoch, UnknownSession
from kvrecall.domain.limits import ServiceLimits
from services.cancellation import run_to_completion
from services.catalog.base import Catalog
from services.catalog.records import Lease

_RENEWALS_PER_CLAIM = 3
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.2


class Claim:
    """This process's right to write one session.

    `epoch` is the one that it writes under; None: it has to take the session over first. `worker`
    had the session's rows at the takeover. `unused`: no worker has seen the epoch yet. `tasks` hold it;
    those of `working` are cancelled when it is lost, but not one whose work is over.
    """

    def __init__(self, session: str) -> None:
        self.session = session
        self.epoch: int | None = None
        self.worker = ""
        self.unused = False
        self.lost = False
        self.changing = asyncio.Lock()
        self.tasks: list[asyncio.Task[object]] = []
        self.working: list[asyncio.Task[object]] = []
        self.renewing: asyncio.Task[None] | None = None

    def adopt(self, lease: Lease) -> None:
        """Give the epoch up when another process took the session over."""
        if lease.epoch != self.epoch:
            self.epoch = None
            self.worker = lease.worker
            self.unused = False


class Leases:
    """This process's leases, under a random holder name."""

    def __init__(
        self,
        catalog: Catalog,
        limits: ServiceLimits,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_lost` is called with a session that another process took over during work on it."""
        self._catalog = catalog
        self._on_lost = on_lost
        self._seconds = limits.claim_seconds
        self.holder = secrets.token_hex(8)

    @asynccontextmanager
    async def held(self, claim: Claim, patience: float = 0.0) -> AsyncIterator[None]:
        """Hold the lease while the work inside lasts.

        Several tasks of this process may hold it at once.

        Another process's lease is waited for `patience` seconds. Raises SessionBusy,
        UnknownSession, and StaleEpoch in the middle of the work when the lease was lost because
        another process took the session over.
        """
        task = asyncio.current_task()
        assert task is not None, "a claim is held by a task"
        await self._enter(claim, patience, task)
        cancelling = task.cancelling()
        try:
            yield
        except asyncio.CancelledError as error:
            if claim.lost and task.uncancel() <= cancelling:
                raise _stale(claim) from error
            raise
        finally:
            claim.working.remove(task)
            await run_to_completion(self._leave(claim, task))

    async def take_over(self, claim: Claim, worker: str) -> int:
        """Take a fresh epoch, with the session's rows in `worker`.

        To be called while the lease is held.

        Raises StaleEpoch when another process took the session over since this one did.
        """
        return await run_to_completion(self._take_over(claim, worker))

    async def _take_over(self, claim: Claim, worker: str) -> int:
        async with claim.changing:
            known = claim.epoch
            claim.adopt(await self._acquire(claim))
            if claim.epoch != known:
                raise _stale(claim)
            if known is not None and claim.unused and claim.worker == worker:
                return known
            claim.epoch = None  # even if the next call fails, the former epoch is void
            epoch = await self._catalog.leases.take_over(claim.session, worker)
            claim.epoch = epoch
            claim.worker = worker
            claim.unused = True
            return epoch

    async def _acquire(self, claim: Claim) -> Lease:
        return await self._catalog.leases.claim(claim.session, self.holder, self._seconds)

    async def _enter(self, claim: Claim, patience: float, task: "asyncio.Task[object]") -> None:
        async with claim.changing:
            if not claim.tasks:
                claim.adopt(await self._acquire_patiently(claim, patience))
                claim.lost = False
                claim.renewing = asyncio.create_task(
                    self._renew(claim), name=f"lease {claim.session}"
                )
            claim.tasks.append(task)
            claim.working.append(task)

    async def _acquire_patiently(self, claim: Claim, patience: float) -> Lease:
        until = time.monotonic() + patience
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._acquire(claim)
            except SessionBusy:
                if time.monotonic() + pause > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _leave(self, claim: Claim, task: "asyncio.Task[object]") -> None:
        async with claim.changing:
            claim.tasks.remove(task)
            if claim.tasks:
                return
            assert claim.renewing is not None, "the first holder started the renewal"
            claim.renewing.cancel()
            claim.renewing = None
            with suppress(ServiceError):  # it expires soon
                await self._catalog.leases.release(claim.session, self.holder)

    async def _renew(self, claim: Claim) -> None:
        while not claim.lost:
            await asyncio.sleep(self._seconds / _RENEWALS_PER_CLAIM)
            async with claim.changing:
                known = claim.epoch
                try:
                    lease = await self._acquire(claim)
                except SessionBusy:
                    claim.lost = True
                except UnknownSession:
                    return  # deleted: the next write fails
                except ServiceError:
                    continue  # the catalog is unreachable: the epoch decides who may write
                else:
                    claim.lost = known is not None and lease.epoch != known
        claim.epoch = None
        self._on_lost(claim.session)
        for task in set(claim.working):
            task.cancel()


def _stale(claim: Claim) -> StaleEpoch:
    return StaleEpoch(
        f"another process took session {claim.session!r} over; send the request again"
    )
