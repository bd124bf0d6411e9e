"""Deletion of dead pages in the workers.

The catalog records them in the transaction that makes them dead, and every process retries until all
workers have deleted them: a killed gateway, or a worker that cannot write, only delays it. A worker
that is away is swept when it is back (`services.pages.sweep`).
"""

import asyncio
from contextlib import suppress

from kvrecall.domain.errors import ServiceError
from kvrecall.domain.page_ids import join_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.context import ServiceContext

_SWEEP_SECONDS = 20.0
_PAGES_AT_ONCE = 4096


class PageCollector:
    """Deletes dead pages, soon after it is woken and periodically.

    `dead`: those that were left after the last sweep.
    """

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._limits = context.limits
        self._wanted = asyncio.Event()
        self.dead = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sweeping."""
        self._task = asyncio.create_task(self._watch(), name="page collector")

    async def stop(self) -> None:
        """Stop sweeping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def wake(self) -> None:
        """Sweep soon: pages may have died."""
        self._wanted.set()

    async def sweep(self) -> None:
        """Delete the dead pages, until a worker is lost or refuses: the next sweep comes."""
        with suppress(ServiceError):
            await self._catalog.pages.drop_abandoned(self._limits.unknown_page_seconds)
            while dead := await self._catalog.pages.get_dead(_PAGES_AT_ONCE):
                # Asked again: a session may have come to some of them.
                live = set(await self._catalog.pages.find_live(dead))
                ids = [id for id in dead if id not in live]
                await self._worker.delete_pages(
                    pb.DeletePagesRequest(catalog=self._catalog.id, page_ids=join_ids(ids))
                )
                await self._catalog.pages.confirm_deleted(dead)
        with suppress(ServiceError):
            self.dead = await self._catalog.pages.count_dead()

    async def _watch(self) -> None:
        while True:
            self._wanted.clear()
            await self.sweep()
            with suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_SECONDS):
                    await self._wanted.wait()
