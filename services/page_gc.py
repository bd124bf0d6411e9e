"""Pages that nobody needs any more: the workers are told of them until they have let go.

The catalog notes them with the deletion itself. So whatever happens before the workers are told (this process is
killed, a worker is away or cannot write), they are told later, by this process or by another one.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from kvrecall.domain.errors import ServiceError
from kvrecall.protocol.v1 import worker_pb2 as wire
from services.catalog.base import Catalog
from services.catalog.records import OrphanedPages
from services.cluster.worker_client import Worker

_SWEEP_SECONDS = 20.0


class PageCollector:
    """Has the workers drop pages, and one task that looks for those that they still have."""

    def __init__(self, catalog: Catalog, worker: Worker) -> None:
        self._catalog = catalog
        self._worker = worker
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on."""
        self._task = asyncio.create_task(self._watch(), name="leftovers")

    async def stop(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def drop(self, leftovers: Sequence[OrphanedPages]) -> None:
        """Have the workers drop these pages. What they cannot drop now they are told again with the next sweep."""
        for left in leftovers:
            with suppress(ServiceError):
                await self._worker.drop(
                    wire.DropRequest(session=left.session, keep_pages=left.keep_pages)
                )
                await self._catalog.page_refs.confirm_deleted(left)

    async def sweep(self) -> None:
        """Have the workers drop whatever they were not told of yet."""
        with suppress(ServiceError):  # the next sweep comes
            await self.drop(await self._catalog.page_refs.get_orphaned())

    async def _watch(self) -> None:
        while True:
            await self.sweep()
            await asyncio.sleep(_SWEEP_SECONDS)
