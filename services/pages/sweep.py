"""The sweep of the workers for pages that no session has.

A worker may hold pages that no session ever had, or has no more: a turn was not committed, a gateway
was killed, the worker was away when they were deleted. Each worker is asked for its pages that no
other can read, in parts, when it joins and periodically, and the catalog for those of them
that no session has. What is such a page twice in a row is deleted. Younger pages than
`unknown_page_seconds` are left alone: their turn may not be committed yet. If it takes longer still,
nothing is lost: a worker deletes no page of a session that is open there.

A catalog that has lost sessions looks the same from here. So if more of a worker's pages are unknown
than crashes explain, none is deleted until a person has looked: the setting `max_unknown_share`. They
are looked up again in every round, and held no longer when the catalog has its data back.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

import structlog

from kvrecall.domain.errors import ManyUnknownPages, ServiceError
from kvrecall.domain.page_ids import PageId, join_ids, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.outage import Outage
from services.context import ServiceContext

_log = structlog.get_logger("kvrecall.sweep")
# A worker deletes so many within seconds.
_PAGES_DELETED = 4096


class PageSweep:
    """Sweeps every worker in a task of its own: a silent one holds up no other."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._limits = context.limits
        # By worker: the unknown pages of its last sweep, and when that began, in monotonic seconds.
        self._unknown: dict[str, set[PageId]] = {}
        self._began: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._outages: dict[str, Outage] = {}
        self._held: dict[str, int] = {}
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> Mapping[str, int]:
        """By worker: the unknown pages that wait for a person, because they are too many."""
        return self._held

    def start(self) -> None:
        """Start with all workers, then go on periodically."""
        self._task = asyncio.create_task(self._watch(), name="sweep")

    async def stop(self) -> None:
        """Stop. A worker that was not reached to the end is swept when a gateway starts."""
        tasks = [*self._running.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def join(self, worker: str) -> None:
        """Sweep a worker that joined, soon."""
        self._began.pop(worker, None)
        self._joined.set()

    async def sweep(self, worker: str) -> int:
        """Delete a worker's pages that are unknown as they were at the last sweep; return how many.

        Raises ManyUnknownPages and other ServiceErrors; what is left is deleted by a later call.
        """
        listed, unknown = await self._find(worker)
        self._check(worker, listed, len(unknown))
        before, self._unknown[worker] = self._unknown.get(worker, set()), unknown
        again = sorted(unknown & before)
        deleted = 0
        for first in range(0, len(again), _PAGES_DELETED):
            deleted += await self._delete(worker, again[first : first + _PAGES_DELETED])
        if deleted:
            _log.info("unknown pages deleted", worker=worker, pages=deleted)
        return deleted

    async def _find(self, worker: str) -> tuple[int, set[PageId]]:
        """Return how many pages the worker has, and those of them that are unknown."""
        listed = 0
        unknown = set[PageId]()
        async with aclosing(self._list(worker)) as parts:
            async for ids in parts:
                listed += len(ids)
                unknown.update(await self._catalog.pages.find_unknown(ids))
        return listed, unknown

    def _check(self, worker: str, listed: int, unknown: int) -> None:
        """Hold the pages if too many are unknown. Raises ManyUnknownPages."""
        share = int(self._limits.max_unknown_share * listed)
        if unknown <= max(self._limits.max_unknown_pages, share):
            self._held.pop(worker, None)
            return
        self._held[worker] = unknown
        self._unknown.pop(worker, None)
        raise ManyUnknownPages(worker, unknown, listed)

    async def _list(self, worker: str) -> AsyncGenerator[Sequence[PageId], None]:
        """Yield the worker's pages that are old enough, in lists."""
        request = pb.ListPagesRequest(
            catalog=self._catalog.id,
            older_than_seconds=self._limits.unknown_page_seconds,
        )
        async with aclosing(self._worker.list_pages(worker, request)) as parts:
            async for part in parts:
                yield split_ids(part.page_ids)

    async def _delete(self, worker: str, ids: Sequence[PageId]) -> int:
        """Delete pages in the worker, unless a session has them by now; count them."""
        # Asked again: a commit may have come, and the catalog may have vanished, meanwhile.
        unknown = await self._catalog.pages.find_unknown(ids)
        request = pb.DeletePagesRequest(catalog=self._catalog.id, page_ids=join_ids(unknown))
        return (await self._worker.delete_pages(request, worker)).deleted

    async def _watch(self) -> None:
        while True:
            with suppress(ServiceError):  # no worker answers now: the next round comes
                self._begin(each.name for each in await self._worker.workers())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._get_delay()):
                    await self._joined.wait()
            self._joined.clear()

    def _get_delay(self) -> float:
        """Return the seconds until the next worker is due."""
        now = time.monotonic()
        due = min(self._began.values(), default=now) + self._limits.sweep_seconds
        return max(0.0, due - now)

    def _begin(self, workers: Iterable[str]) -> None:
        """Begin with each worker that is due and is not being swept; forget those that left."""
        names = set(workers)
        seen: dict[str, Any]
        for seen in (self._unknown, self._began, self._outages, self._held):
            for name in seen.keys() - names:
                del seen[name]
        now = time.monotonic()
        for name in names:
            if now - self._began.get(name, float("-inf")) < self._limits.sweep_seconds:
                continue
            self._began[name] = now
            if name not in self._running:
                task = asyncio.create_task(self._try(name), name=f"sweep {name}")
                self._running[name] = task

    async def _try(self, worker: str) -> None:
        try:
            await self.sweep(worker)
        except ServiceError as error:
            new = Outage(_log, "sweep incomplete", "sweeps go on")
            self._outages.setdefault(worker, new).note(error.message, worker=worker)
        except Exception:  # an error here must not end later rounds
            _log.exception("sweep failed", worker=worker)
        else:
            if worker in self._outages:
                self._outages.pop(worker).end(worker=worker)
        finally:
            del self._running[worker]
