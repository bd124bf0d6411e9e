"""Isolation of tenants, and their quotas: sessions, conversations, tokens, bytes in the catalog."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import TypeVar

from kvrecall.domain.errors import LimitExceeded, QuotaExceeded
from kvrecall.domain.events import EventBus, QuotaReached
from kvrecall.domain.limits import ServiceLimits
from services.catalog.base import Catalog
from services.catalog.quota import COUNTABLES, TenantLimits, TenantUse

T = TypeVar("T")
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

    @property
    def limits(self) -> TenantLimits:
        """What one tenant may have. The bytes of rows are those of its tokens."""
        limits = self._limits
        most = [] if limits.tenant_tokens is None else [limits.tenant_tokens]
        if limits.tenant_bytes is not None and self._token_bytes:
            most.append(limits.tenant_bytes // self._token_bytes)
        return TenantLimits(
            sessions=limits.tenant_sessions,
            conversations=limits.tenant_conversations,
            tokens=min(most, default=None),
            bytes=limits.tenant_catalog_bytes,
        )

    async def check_new_session(self, tenant: str, tokens: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may have one more session, of so many tokens.

        It spares work in vain: the session's commit counts again. The session `keep` is not deleted for it.
        """
        await self._require(tenant, TenantUse(sessions=1, tokens=tokens, bytes=1), keep)

    async def check_quota(self, tenant: str, more: int = 1, keep: str = "") -> None:
        """Raise QuotaExceeded unless the tenant may hold `more` tokens, with the bytes of their rows.

        Rows that sessions share count for each of them. The session `keep` is not deleted for them.
        """
        await self._require(tenant, TenantUse(tokens=more, bytes=1), keep)

    async def keep_within(
        self, tenant: str, write: Callable[[TenantLimits], Awaitable[T]], keep: str = ""
    ) -> T:
        """Run `write(limits)`, which counts what the tenant has in the same step, and return its result.

        While it raises QuotaExceeded room is made, but not of the session `keep`. Raises that if
        there is none, and for conversations, which are not deleted for others.
        """
        while True:
            try:
                return await write(self.limits)
            except QuotaExceeded as refusal:
                is_final = refusal.what == "conversations"
                if is_final or not await self._make_room(tenant, keep):
                    self._events.publish(QuotaReached(tenant))
                    raise

    def check_metadata(self, metadata: Mapping[str, str] | None) -> None:
        """Raise LimitExceeded for metadata that is larger than a session may have."""
        size = sum(len(f"{name}{value}".encode()) for name, value in (metadata or {}).items())
        limit = self._limits.max_metadata_bytes
        if size > limit:
            message = f"the metadata has {size} bytes; the limit is {limit}"
            raise LimitExceeded("metadata", message, limit)

    async def _require(self, tenant: str, more: TenantUse, keep: str) -> None:
        """Raise QuotaExceeded unless the tenant may have so much more."""

        async def count(limits: TenantLimits) -> None:
            use = asdict(await self._catalog.sessions.get_use(tenant))
            after = TenantUse(**{name: use[name] + n for name, n in asdict(more).items()})
            limits.check(after, [what for what in COUNTABLES if getattr(more, what)])

        await self.keep_within(tenant, count, keep)


async def _keep_all(tenant: str, keep: str) -> bool:
    return False
