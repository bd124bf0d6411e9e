"""Isolation of tenants, and their token quotas.

The tenant's name comes from a trusted proxy in front of the service.
"""

from collections.abc import Awaitable, Callable, Mapping

from kvrecall.domain.errors import LimitExceeded, QuotaExceeded, UnknownSession
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog

# make_room(tenant, keep) deletes sessions that nobody else would, all but the session `keep`.
MakeRoom = Callable[[str, str], Awaitable[bool]]


class Quotas:
    """Checks that tenants see only their own sessions and stay within their quotas.

    Sessions of stateless requests make room for others before a tenant is refused something.
    """

    def __init__(self, catalog: Catalog, events: EventBus, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._events = events
        self._limits = limits
        self._make_room: MakeRoom = _keep_all

    def use(self, make_room: MakeRoom) -> None:
        """Make room by this from now on."""
        self._make_room = make_room

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

    async def check_new_session(self, tenant: str, tokens: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may have one more session, of so many tokens.

        The session `keep` is not deleted for it.
        """
        limit = self._limits.tenant_sessions
        while (count := await self._catalog.sessions.count(tenant)) >= limit:
            if not await self._make_room(tenant, keep):
                self._events.publish(QuotaReached(tenant))
                message = f"the tenant has {count} sessions; the limit is {limit}: delete some"
                raise QuotaExceeded(message, limit)
        await self.check_quota(tenant, tokens, keep)

    def check_metadata(self, metadata: Mapping[str, str] | None) -> None:
        """Raise LimitExceeded for metadata that is larger than a session may have."""
        size = sum(len(f"{name}{value}".encode()) for name, value in (metadata or {}).items())
        limit = self._limits.max_metadata_bytes
        if size > limit:
            message = f"the metadata has {size} bytes; the limit is {limit}"
            raise LimitExceeded("metadata", message, limit)

    async def check_quota(self, tenant: str, more: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may hold `more` tokens.

        The session `keep` is not deleted for them.
        """
        limit = self._limits.tenant_tokens
        if limit is None:
            return
        while (held := await self._catalog.sessions.get_tenant_tokens(tenant)) + more > limit:
            if not await self._make_room(tenant, keep):
                self._events.publish(QuotaReached(tenant))
                message = f"the tenant's sessions hold {held} tokens; the limit is {limit}: delete some sessions"
                raise QuotaExceeded(message, limit)


async def _keep_all(tenant: str, keep: str) -> bool:
    return False
