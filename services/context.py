"""The collaborators that every part of the service works with."""

from dataclasses import dataclass
from typing import Self

from kvrecall.domain.events import EventBus
from kvrecall.domain.limits import ServiceLimits
from kvrecall.sandbox.settings import SandboxSettings
from services.admission import Admission
from services.catalog.base import Catalog
from services.catalog.observed import ObservedCatalog
from services.cluster.worker_client import Worker
from services.grammars.checks import GrammarChecks
from services.quarantine import Quarantine
from services.quotas import Quotas
from services.sessions.manager import SessionManager


@dataclass(frozen=True)
class ServiceContext:
    """One catalog, one worker (or a pool of them) and what this process shares between requests."""

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
        )
