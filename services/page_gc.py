"""Garbage collection of orphaned pages.

The catalog records them in the transaction of the deletion itself, and every process retries until
all workers have acknowledged the delete: a killed gateway, or a worker that is away or cannot
write, only delays it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvrecall.domain.errors import ServiceError
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.catalog.records import OrphanedPages
from services.context import ServiceContext

_SWEEP_SECONDS = 20.0


class PageCollector:
    """Deletes orphaned pages in the workers, at once and in periodic sweeps."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
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
        """Delete these pages in the workers. What fails now is retried by the next sweep."""
        for orphan in orphans:
            with suppress(ServiceError):
                await self._worker.delete(
                    pb.DeleteRequest(session=orphan.session, keep_pages=orphan.keep_pages)
                )
                await self._catalog.page_refs.confirm_deleted(orphan)

    async def sweep(self) -> None:
        """Delete all orphaned pages that are still recorded."""
        with suppress(ServiceError):  # the next sweep comes
            await self.delete(await self._catalog.page_refs.get_orphaned())

    async def _watch(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)
