"""Isolation of tenants, and their quotas: sessions, tokens, bytes of rows."""

from collections.abc import Mapping
from typing import NoReturn

from kvrecall.domain.errors import LimitExceeded, QuotaExceeded
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog


class Quotas:
    """Checks that tenants see only their own sessions and stay within their quotas."""

    def __init__(self, catalog: Catalog, events: EventBus, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._events = events
        self._limits = limits
        self._token_bytes = 0

    def learn(self, token_bytes: int) -> None:
        """Learn the bytes that the rows of one token take in the workers, uncompressed."""
        self._token_bytes = token_bytes

    async def check_owner(self, session: str, tenant: str) -> None:
        """Raise UnknownSession for another tenant's session, as for one that does not exist."""
        await self._catalog.sessions.get(session, tenant)

    async def check_new_session(self, tenant: str, tokens: int = 1) -> None:
        """Raise QuotaExceeded unless the tenant may have one more session, of so many tokens."""
        limit = self._limits.tenant_sessions
        count = await self._catalog.sessions.count(tenant)
        if count >= limit:
            self._events.publish(QuotaReached(tenant))
            message = f"the tenant has {count} sessions; the limit is {limit}: delete some"
            raise QuotaExceeded(message, limit)
        await self.check_quota(tenant, tokens)

    def check_metadata(self, metadata: Mapping[str, str] | None) -> None:
        """Raise LimitExceeded for metadata that is larger than a session may have."""
        size = sum(len(f"{name}{value}".encode()) for name, value in (metadata or {}).items())
        limit = self._limits.max_metadata_bytes
        if size > limit:
            message = f"the metadata has {size} bytes; the limit is {limit}"
            raise LimitExceeded("metadata", message, limit)

    async def check_quota(self, tenant: str, more: int = 1) -> None:
        """Raise QuotaExceeded unless the tenant may hold `more` tokens, with the bytes of their rows.

        Rows that sessions share count for each of them.
        """
        tokens, size = self._limits.tenant_tokens, self._limits.tenant_bytes
        if tokens is None and size is None:
            return
        held = await self._catalog.sessions.get_tenant_tokens(tenant)
        if tokens is not None and held + more > tokens:
            self._refuse(tenant, held, "tokens", tokens)
        if size is not None and (held + more) * self._token_bytes > size:
            self._refuse(tenant, held * self._token_bytes, "bytes", size)

    def _refuse(self, tenant: str, held: int, what: str, limit: int) -> NoReturn:
        self._events.publish(QuotaReached(tenant))
        message = f"the tenant's sessions hold {held} {what}; the limit is {limit}: delete some"
        raise QuotaExceeded(message, limit)
