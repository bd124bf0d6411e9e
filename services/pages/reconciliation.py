"""Reconciliation of the workers with the catalog: sessions that it does not know are deleted.

A worker may hold a session that the catalog never had, or has no more: a gateway was killed between
the two steps of a creation, or an open arrived after the deletion. Each worker is asked for its
sessions in bounded pages, and the catalog for those of them that it does not know. After a worker
joins that is done once for all of its sessions, then periodically for those that were opened since
the last time, so that the cost follows what changed.

A session in creation is open in a worker before the catalog has it. It is left alone until it has
been idle for `orphan_seconds`. If its creation takes longer still, nothing is lost: the worker
deletes no session that is in use, and one that it has deleted is opened again under a new epoch.

A catalog that has lost sessions looks the same from here. So if more of a worker's sessions are
unknown than crashes explain, none is deleted until a person has looked: the setting
`max_unknown_share`. They are looked up again in every round, and held no longer when the catalog has
its data back.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import structlog

from kvrecall.domain.errors import ManyUnknownSessions, ServiceError
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall.telemetry.outage import Outage
from services.catalog.records import OrphanedPages
from services.context import ServiceContext

_log = structlog.get_logger("kvrecall.reconciliation")
# Sessions per page: a catalog answers for one within milliseconds, a worker deletes one within
# seconds.
_PAGE_SESSIONS = 500
# Ages are measured by the worker after this process has sent its request.
_OVERLAP_SECONDS = 10.0


class Reconciler:
    """Reconciles every worker in a task of its own: a silent one holds up no other."""

    def __init__(self, context: ServiceContext) -> None:
        self._catalog = context.catalog
        self._worker = context.worker
        self._limits = context.limits
        # By worker: when its last complete reconciliation began, in monotonic seconds.
        self._reconciled: dict[str, float] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._joined_at: dict[str, float] = {}
        self._outages: dict[str, Outage] = {}
        self._held: dict[str, int] = {}
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def held(self) -> Mapping[str, int]:
        """By worker: the unknown sessions that wait for a person, because they are too many."""
        return self._held

    def start(self) -> None:
        """Start with all workers, then go on periodically."""
        self._task = asyncio.create_task(self._watch(), name="reconciliation")

    async def stop(self) -> None:
        """Stop. A worker that was not reached to the end is reconciled when a gateway starts."""
        tasks = [*self._running.values(), *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def join(self, worker: str) -> None:
        """Reconcile all sessions of a worker that joined, soon."""
        self._joined_at[worker] = time.monotonic()
        self._reconciled.pop(worker, None)
        self._joined.set()

    async def reconcile(self, worker: str) -> int:
        """Delete a worker's sessions that the catalog does not know; return how many.

        All of them at the first time, then those opened since the last. Raises ManyUnknownSessions
        and other ServiceErrors; what is left is deleted by a later call.
        """
        began = time.monotonic()
        last = self._reconciled.get(worker)
        since = None if last is None else began - last
        unknown = await self._find(worker, since)
        deleted = 0
        for first in range(0, len(unknown), _PAGE_SESSIONS):
            # Asked again: a creation may have ended, and the catalog may have vanished, meanwhile.
            orphans = await self._catalog.page_refs.find_unknown(
                unknown[first : first + _PAGE_SESSIONS]
            )
            deleted += await self._delete(worker, orphans)
        joined_since = self._joined_at.get(worker, began) > began
        if len(unknown) == deleted and not joined_since:  # else some were in use, or may have come
            self._reconciled[worker] = began
        if deleted:
            _log.info("unknown sessions deleted", worker=worker, sessions=deleted)
        return deleted

    async def _find(self, worker: str, since: float | None) -> list[str]:
        """Return the worker's unknown sessions, of those opened in the last `since` seconds or all.

        Too many of them are held. Raises ManyUnknownSessions.
        """
        opened = pb.ListSessionsRequest(min_age=self._limits.orphan_seconds)
        requests = [opened]
        if since is None:
            requests.append(pb.ListSessionsRequest(stored=True))
        else:
            opened.max_age = since + self._limits.orphan_seconds + _OVERLAP_SECONDS
        listed = 0
        unknown = dict[str, None]()
        for request in requests:
            count = 0
            async for page in self._list(worker, request):
                count += len(page)
                orphans = await self._catalog.page_refs.find_unknown(page)
                unknown.update((each.session, None) for each in orphans)
            listed = max(listed, count)  # a session may be open and stored
        if len(unknown) <= self._get_most(listed):
            self._held.pop(worker, None)
            return list(unknown)
        if since is not None:  # many of those opened last may be few of all
            return await self._find(worker, None)
        self._held[worker] = len(unknown)
        raise ManyUnknownSessions(worker, len(unknown), listed)

    def _get_most(self, listed: int) -> int:
        """Return how many of so many sessions are deleted without asking a person."""
        share = int(self._limits.max_unknown_share * listed)
        return max(self._limits.max_unknown_sessions, share)

    async def _list(self, worker: str, request: pb.ListSessionsRequest) -> AsyncIterator[list[str]]:
        """Yield the worker's sessions in pages."""
        request.catalog = self._catalog.id
        request.limit = _PAGE_SESSIONS
        while page := list((await self._worker.list_sessions(worker, request)).sessions):
            yield page
            request.after = page[-1]

    async def _delete(self, worker: str, orphans: Sequence[OrphanedPages]) -> int:
        """Delete sessions in the worker, but for their pages that others share; count them."""
        if not orphans:
            return 0
        sessions = [
            pb.DeleteRequest(session=each.session, keep_pages=each.keep_pages) for each in orphans
        ]
        request = pb.DeleteUnknownRequest(
            catalog=self._catalog.id,
            sessions=sessions,
            idle_seconds=self._limits.orphan_seconds,
        )
        return (await self._worker.delete_unknown(worker, request)).deleted

    async def _watch(self) -> None:
        while True:
            with suppress(ServiceError):  # no worker answers now: the next round comes
                self._begin(each.name for each in await self._worker.workers())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._joined.wait(), self._limits.reconcile_seconds)
            self._joined.clear()

    def _begin(self, workers: Iterable[str]) -> None:
        """Begin with each worker that is not being reconciled; forget those that left."""
        names = set(workers)
        seen: dict[str, Any]
        for seen in (self._reconciled, self._joined_at, self._outages, self._held):
            for name in seen.keys() - names:
                del seen[name]
        for name in names - self._running.keys():
            self._running[name] = asyncio.create_task(
                self._try(name), name=f"reconciliation {name}"
            )

    async def _try(self, worker: str) -> None:
        try:
            await self.reconcile(worker)
        except ServiceError as error:
            new = Outage(_log, "reconciliation incomplete", "reconciliation goes on")
            self._outages.setdefault(worker, new).note(error.message, worker=worker)
        except Exception:  # an error here must not end later rounds
            _log.exception("reconciliation failed", worker=worker)
        else:
            if worker in self._outages:
                self._outages.pop(worker).end(worker=worker)
        finally:
            del self._running[worker]
