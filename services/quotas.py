"""Isolation of tenants, and their quotas: sessions, tokens, bytes of rows."""

from collections.abc import Awaitable, Callable, Mapping

from kvrecall.domain.errors import LimitExceeded, QuotaExceeded
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog
from services.catalog.quota import check_room

# make_room(tenant, keep) deletes sessions that no client deletes, all but the session `keep`.
MakeRoom = Callable[[str, str], Awaitable[bool]]


class Quotas:
    """Checks that tenants see only their own sessions and stay within their quotas.

    Sessions of stateless requests make room for others before a tenant is refused something.
    """

    def __init__(self, catalog: Catalog, events: EventBus, limits: ServiceLimits) -> None:
        self._catalog = catalog
        self._events = events
        self._limits = limits
        self._token_bytes = 0
        self._make_room: MakeRoom = _keep_all

    def use(self, make_room: MakeRoom) -> None:
        """Make room by this from now on."""
        self._make_room = make_room

    def learn(self, token_bytes: int) -> None:
        """Learn the bytes that the rows of one token take in the workers, uncompressed."""
        self._token_bytes = token_bytes

    async def check_owner(self, session: str, tenant: str) -> None:
        """Raise UnknownSession for another tenant's session, as for one that does not exist."""
        await self._catalog.sessions.get(session, tenant)

    async def check_new_session(self, tenant: str, tokens: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may have one more session, of so many tokens.

        It spares work in vain: the session's commit counts again. The session `keep` is not deleted for it.
        """

        async def count(limit: int) -> None:
            check_room(await self._catalog.sessions.count(tenant), limit, "sessions")

        await self.add_session(tenant, count, keep)
        await self.check_quota(tenant, tokens, keep)

    async def add_session(
        self, tenant: str, add: Callable[[int], Awaitable[None]], keep: str = ""
    ) -> None:
        """Add a session by `add(limit)`, which counts the tenant's sessions in the same step.

        While it raises QuotaExceeded room is made, but not of the session `keep`. Raises that if
        there is none.
        """
        while True:
            try:
                return await add(self._limits.tenant_sessions)
            except QuotaExceeded:
                if not await self._make_room(tenant, keep):
                    self._events.publish(QuotaReached(tenant))
                    raise

    def check_metadata(self, metadata: Mapping[str, str] | None) -> None:
        """Raise LimitExceeded for metadata that is larger than a session may have."""
        size = sum(len(f"{name}{value}".encode()) for name, value in (metadata or {}).items())
        limit = self._limits.max_metadata_bytes
        if size > limit:
            message = f"the metadata has {size} bytes; the limit is {limit}"
            raise LimitExceeded("metadata", message, limit)

    async def check_quota(self, tenant: str, more: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may hold `more` tokens, with the bytes of their rows.

        Rows that sessions share count for each of them. The session `keep` is not deleted for them.
        """
        limits = (
            ("tokens", self._limits.tenant_tokens, 1),
            ("bytes", self._limits.tenant_bytes, self._token_bytes),
        )
        for what, limit, size in limits:
            if limit is not None:
                await self._check(tenant, more, keep, what, limit, size)

    async def _check(
        self, tenant: str, more: int, keep: str, what: str, limit: int, size: int
    ) -> None:
        """Raise QuotaExceeded unless tokens of this size stay within a limit."""
        while True:
            held = await self._catalog.sessions.get_tenant_tokens(tenant)
            if (held + more) * size <= limit:
                return
            if not await self._make_room(tenant, keep):
                break
        self._events.publish(QuotaReached(tenant))
        message = (
            f"the tenant's sessions hold {held * size} {what}; the limit is {limit}: delete some "
            "sessions"
        )
        raise QuotaExceeded(message, limit)


async def _keep_all(tenant: str, keep: str) -> bool:
    return False
