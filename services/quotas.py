"""Whose a session is, and how much one tenant may hold. Who a tenant is, is told by whoever runs a proxy in front."""

from kvrecall.domain.errors import QuotaExceeded, UnknownSession
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog


class Quotas:
    """Keeps tenants apart, and within their quotas."""

    def __init__(self, catalog: Catalog, observers: EventBus, settings: ServiceLimits) -> None:
        self._catalog = catalog
        self._observers = observers
        self._settings = settings

    async def check_owner(self, session: str, tenant: str) -> None:
        """Another tenant's session is as unknown as one that is not there. Raises UnknownSession."""
        if (await self._catalog.sessions.get(session)).settings.tenant != tenant:
            raise UnknownSession(session)

    async def check_not_anothers(self, session: str, tenant: str) -> None:
        """As `check_owner`; that a session is not there is left to whoever asks for it."""
        try:
            found = await self._catalog.sessions.get(session)
        except UnknownSession:
            return
        if found.settings.tenant != tenant:
            raise UnknownSession(session)

    async def check_quota(self, tenant: str, more: int = 1) -> None:
        """Whether the tenant may hold so many tokens more. Raises QuotaExceeded."""
        limit = self._settings.tenant_tokens
        if limit is None:
            return
        held = await self._catalog.sessions.get_tenant_tokens(tenant)
        if held + more > limit:
            self._observers.publish(QuotaReached(tenant))
            message = f"the tenant's sessions hold {held} tokens and may hold {limit}; delete some of them"
            raise QuotaExceeded(message, limit)
