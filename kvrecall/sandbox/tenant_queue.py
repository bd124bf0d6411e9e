"""Queue of jobs in which tenants take turns."""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from threading import Condition
from typing import Generic, TypeVar

Job = TypeVar("Job")


class QueueFull(Exception):
    """As many jobs of a tenant wait as may."""


class TenantQueue(Generic[Job]):
    """Jobs that wait, by tenant: few of a tenant run at a time, and tenants take turns.

    So the jobs of one tenant keep others waiting for one of them at most. `put` and `take` may be
    called from any thread; who took a job calls `finish` with its tenant.
    """

    def __init__(self, most: int, at_once: int = 1) -> None:
        """Hold up to `most` jobs of each tenant, of which `at_once` may run."""
        self._most = most
        self._at_once = at_once
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._changed = Condition()
        self._closed = False

    def put(self, tenant: str, job: Job) -> None:
        """Add a job. Raises QueueFull."""
        with self._changed:
            jobs = self._waiting.setdefault(tenant, deque())
            if self._closed or len(jobs) >= self._most:
                raise QueueFull
            jobs.append(job)
            self._changed.notify()

    def take(self) -> tuple[str, Job] | None:
        """Wait for the next job and return it with its tenant; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                free = (each for each in self._waiting if self._running[each] < self._at_once)
                if (tenant := next(free, None)) is not None:
                    return tenant, self._start(tenant)
                self._changed.wait()
            return None

    def finish(self, tenant: str) -> None:
        """Note that the tenant's job has ended."""
        with self._changed:
            self._running -= Counter([tenant])  # those at zero go
            self._changed.notify()

    def close(self) -> Iterable[Job]:
        """End all `take`s. Returns the jobs that were not taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return [job for jobs in self._waiting.values() for job in jobs]

    def _start(self, tenant: str) -> Job:
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the other tenants'
        self._running[tenant] += 1
        return job
