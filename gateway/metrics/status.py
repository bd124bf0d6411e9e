"""Gauges of the gateway that are read at each scrape."""

import time

from kvrecall.domain.errors import ServiceError
from kvrecall.metrics.page import Metrics
from services.status import ServiceStatus

# Every gateway asks the one catalog: not at every scrape of each.
_COUNT_SECONDS = 10.0


class StatusGauges:
    """Sets the gauges of a service's state."""

    def __init__(self, metrics: Metrics, status: ServiceStatus) -> None:
        self._metrics = metrics
        self._status = status
        self._counted_at = float("-inf")
        self._workers: set[str] = set()

    async def refresh(self) -> None:
        """Read the state. What the catalog does not answer keeps its last value."""
        metrics, status = self._metrics, self._status
        admission = status.admission
        metrics.set("turns_running", admission.running)
        metrics.set("turns_waiting", admission.waiting)
        metrics.set("turns_limit", status.limits.max_running_turns, kind="running")
        metrics.set("turns_limit", status.limits.max_waiting_turns, kind="waiting")
        metrics.set("repairs_running", status.repairs_running)
        metrics.set("event_streams", status.event_streams)
        metrics.set("dead_pages", status.dead_pages)
        metrics.set("held_pages", status.held_pages)
        await self._set_workers()
        if time.monotonic() - self._counted_at >= _COUNT_SECONDS:
            await self._count_sessions()

    async def _set_workers(self) -> None:
        workers = await self._status.find_workers()
        for name in self._workers - workers.keys():
            self._metrics.set("worker_up", None, worker=name)
        for name, reachable in workers.items():
            self._metrics.set("worker_up", float(reachable), worker=name)
        self._workers = set(workers)

    async def _count_sessions(self) -> None:
        self._counted_at = time.monotonic()
        try:
            counts = await self._status.count_sessions()
            has_room = await self._status.has_room()
        except ServiceError:
            self._metrics.set("catalog_up", 0.0)
            return
        self._metrics.set("catalog_up", 1.0)
        self._metrics.set("catalog_full", float(not has_room))
        for state, count in counts.items():
            self._metrics.set("sessions", count, state=state.value)
