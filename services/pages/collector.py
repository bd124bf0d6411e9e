"""Garbage collection of orphaned pages.

The catalog records them in the transaction of the deletion itself, and every process retries until
all workers have acknowledged the delete: a killed gateway, or a worker that is away or cannot
write, only delays it. Pages that are written before their session is committed are recorded first:
they are orphaned when the commit does not follow.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvrecall.domain.errors import ServiceError, WorkerRefused
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import OrphanedPages
from services.context import ServiceContext

_SWEEP_SECONDS = 20.0
# The longest that a deletion waits for the workers; the sweep goes on from there.
_REQUEST_SECONDS = 2.0


class PageCollector:
    """Deletes orphaned pages in the workers: a session's own at once, the rest in sweeps.

    `orphaned`: sessions whose pages the last sweep could not delete everywhere.
    """

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._wanted = asyncio.Event()
        self.orphaned = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sweeping."""
        self._task = asyncio.create_task(self._watch(), name="page collector")

    async def stop(self) -> None:
        """Stop sweeping."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def delete(self, orphans: Sequence[OrphanedPages]) -> None:
        """Delete the first of these pages in the workers, and leave the others to a sweep, soon.

        What fails now or takes long is left to the sweep as well: a deletion pays for its own
        session only, for a bounded time.
        """
        own, *others = orphans
        if others:
            self._wanted.set()
        with suppress(ServiceError, TimeoutError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                await self._delete(own)

    async def sweep(self) -> None:
        """Delete the orphaned pages that are still recorded, until a worker is lost.

        A lost worker would lose the next call as well, each after its time limit.
        """
        with suppress(ServiceError):  # the next sweep comes
            orphans = await self._catalog.page_refs.get_orphaned()
            self.orphaned = len(orphans)
            for orphan in orphans:
                with suppress(WorkerRefused):
                    await self._delete(orphan)
                    self.orphaned -= 1

    async def _delete(self, orphan: OrphanedPages) -> None:
        await self._worker.delete(
            pb.DeleteRequest(session=orphan.session, keep_pages=orphan.keep_pages)
        )
        await self._catalog.page_refs.confirm_deleted(orphan)

    async def _watch(self) -> None:
        while True:
            self._wanted.clear()
            await self.sweep()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), _SWEEP_SECONDS)
