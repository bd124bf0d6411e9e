"""The state of the service at a moment: its load, its sessions, its workers."""

from collections.abc import Awaitable, Mapping
from typing import Literal, TypeVar

from kvrecall.domain.errors import CatalogUnreachable, ServiceError
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.sessions.state_machine import SessionState
from services.admission.admission import Admission
from services.catalog.waiting import ask_catalog
from services.context import ServiceContext
from services.feed.feed import Feed
from services.pages.collector import PageCollector
from services.pages.sweep import PageSweep

_T = TypeVar("_T")

# Lost workers that are remembered: they are shown as unreachable.
_MAX_LOST = 64
_CATALOG_SECONDS = 2.0
_Seen = Literal["reached", "draining", "lost"]


class ServiceStatus:
    """Reads the state of the service, and remembers the workers that it was reached by."""

    def __init__(
        self, context: ServiceContext, collector: PageCollector, sweep: PageSweep, feed: Feed
    ) -> None:
        self._context = context
        self._sweep = sweep
        self._collector = collector
        self._feed = feed
        # Workers by name as last seen: reached, draining, or lost.
        self._workers: dict[str, _Seen] = {}

    @property
    def admission(self) -> Admission:
        """Running and waiting turns."""
        return self._context.admission

    @property
    def limits(self) -> ServiceLimits:
        """Limits that the operator chose."""
        return self._context.limits

    @property
    def repairs_running(self) -> int:
        """Repairs that run for this process."""
        sessions = self._context.sessions.all()
        return sum(live.state is SessionState.REPAIRING for live in sessions)

    @property
    def event_streams(self) -> int:
        """Streams of events that clients of this process have open."""
        return len(self._feed.subscriptions)

    @property
    def dead_pages(self) -> int:
        """Pages without a session that were not deleted in all workers when it was last looked."""
        return self._collector.dead

    @property
    def held_pages(self) -> int:
        """Pages of workers that no session has and that are too many to delete."""
        return sum(self._sweep.held.values())

    async def check_catalog(self) -> None:
        """Read from the catalog. Raises CatalogError if it does not answer in time."""
        await self._ask(self._context.catalog.sessions.count(""))

    async def has_room(self) -> bool:
        """Return whether the catalog may store more. Raises CatalogError if it does not answer."""
        return await self._ask(self._context.catalog.has_room())

    async def _ask(self, read: Awaitable[_T]) -> _T:
        try:
            return await ask_catalog(read, _CATALOG_SECONDS)
        except CatalogUnreachable as error:
            self._context.catalog.outage.note(error.message)
            raise

    async def find_failed_tiers(self) -> list[str]:
        """Return the tiers that fail now, as WORKER/TIER. Raises WorkerLost if no worker answers."""
        stats = await self._context.worker.stats()
        return sorted(
            f"{worker}/{tier}"
            for worker, found in stats.items()
            for tier, state in found.tiers.items()
            if state.failure
        )

    async def count_sessions(self) -> Mapping[SessionState, int]:
        """Count the sessions by state. Raises CatalogError if the catalog does not answer in time."""
        return await self._ask(self._context.catalog.sessions.count_by_state())

    async def find_workers(self) -> Mapping[str, bool]:
        """Return the workers seen so far by name, and whether each is reached now.

        Lost workers are remembered between calls, the last 64 of them; one that was draining when
        it was last seen left on purpose, and is forgotten. A worker under a new name takes the place
        of the one that was lost first: a container that is created again has another address.
        """
        try:
            records = await self._context.worker.workers()
        except ServiceError:
            records = []
        now: dict[str, _Seen] = {
            record.name: "draining" if record.draining else "reached" for record in records
        }
        lost = [
            name for name, seen in self._workers.items() if name not in now and seen != "draining"
        ]
        joined = [
            name for name, seen in now.items() if seen == "reached" and name not in self._workers
        ]
        remembered = lost[len(joined) :][-_MAX_LOST:]
        self._workers = {**dict.fromkeys(remembered, "lost"), **now}
        return {name: seen != "lost" for name, seen in self._workers.items()}
