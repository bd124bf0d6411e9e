"""Isolation of tenants, and their token quotas.

The tenant's name comes from a trusted proxy in front of the service.
"""

from kvrecall.domain.errors import QuotaExceeded, UnknownSession
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog


class Quotas:
    """Checks that tenants see only their own sessions and stay within their quotas."""

    def __init__(self, catalog: Catalog, events: EventBus, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._events = events
        self._limits = limits

    async def check_owner(self, session: str, tenant: str) -> None:
        """Raise UnknownSession for another tenant's session, as for one that does not exist."""
        if (await self._catalog.sessions.get(session)).settings.tenant != tenant:
            raise UnknownSession(session)

    async def check_visible(self, session: str, tenant: str) -> None:
        """Raise UnknownSession for another tenant's session.

        A session that does not exist passes.
        """
        try:
            found = await self._catalog.sessions.get(session)
        except UnknownSession:
            return
        if found.settings.tenant != tenant:
            raise UnknownSession(session)

    async def check_quota(self, tenant: str, more: int = 1) -> None:
        """Raise QuotaExceeded unless the tenant may hold `more` tokens."""
        limit = self._limits.tenant_tokens
        if limit is None:
            return
        held = await self._catalog.sessions.get_tenant_tokens(tenant)
        if held + more > limit:
            self._events.publish(QuotaReached(tenant))
            message = f"the tenant's sessions hold {held} tokens; the limit is {limit}: delete some sessions"
            raise QuotaExceeded(message, limit)
