"""The collaborators that every part of the service works with."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

from kvrecall.domain.events import EventBus
from kvrecall.domain.limits import ServiceLimits
from kvrecall.sandbox.settings import SandboxSettings
from kvrecall.sandbox.tenant_threads import TenantThreads
from services.access.quotas import Quotas
from services.admission.admission import Admission
from services.admission.quarantine import Quarantine
from services.catalog.base import Catalog
from services.catalog.observed import ObservedCatalog
from services.cluster.metering import meter
from services.cluster.worker_client import Worker
from services.grammars import GrammarChecks
from services.sessions.manager import SessionManager

# Clusterings of one tenant's sessions that may wait: background work, of one session at a time each.
_MOST_WAITING = 4096


@dataclass(frozen=True)
class ServiceContext:
    """One catalog, one worker (or a pool of them) and what this process shares between requests.

    Each kind of work beside the event loop has threads of its own, so that no commit waits for work
    that clients choose: states are packed on `packing`, episodes clustered on `clustering`.
    """

    catalog: ObservedCatalog
    worker: Worker
    events: EventBus
    limits: ServiceLimits
    sessions: SessionManager
    admission: Admission
    creations: Admission
    quotas: Quotas
    quarantine: Quarantine
    grammars: GrammarChecks
    packing: ThreadPoolExecutor
    clustering: TenantThreads

    @classmethod
    def create(
        cls,
        catalog: Catalog,
        worker: Worker,
        limits: ServiceLimits,
        sandbox: SandboxSettings | None = None,
    ) -> Self:
        """Build the context of one service."""
        events = EventBus()
        observed = ObservedCatalog(catalog, events.publish)
        worker = meter(worker, events)
        return cls(
            catalog=observed,
            worker=worker,
            events=events,
            limits=limits,
            sessions=SessionManager(observed, worker, events, limits),
            admission=Admission(
                limits.max_running_turns, limits.max_waiting_turns, "turns", limits
            ),
            creations=Admission(
                limits.max_running_creations, limits.max_waiting_creations, "creations", limits
            ),
            quotas=Quotas(observed, events, limits),
            quarantine=Quarantine(limits.quarantine_seconds),
            grammars=GrammarChecks(sandbox or SandboxSettings(), events.publish),
            packing=ThreadPoolExecutor(2, "packing"),
            clustering=TenantThreads(1, _MOST_WAITING, "clustering"),
        )

    def close(self) -> None:
        """End the threads and processes of this process's own."""
        self.grammars.close()
        self.packing.shutdown(cancel_futures=True)
        self.clustering.close()
