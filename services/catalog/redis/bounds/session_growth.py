"""Commits to sessions that may grow: counted against the limits of the session's tenant."""

from collections import OrderedDict

from kvrecall.domain.errors import CatalogError, ServiceError
from services.catalog.quota import UNLIMITED, TenantLimits
from services.catalog.records import IdempotencyRecord
from services.catalog.redis.bounds.tenant_use import Growth, RedisTenantUse
from services.catalog.redis.commits import RedisCommit
from services.catalog.redis.keys import META
from services.catalog.redis.slot import Applied, ChangedMeanwhile, SessionSlots

_TENANTS_KNOWN = 10_000


class SessionGrowth:
    """Applies commits that store more of a session. Raises as `SessionSlots.apply`, QuotaExceeded."""

    def __init__(self, slots: SessionSlots, use: RedisTenantUse) -> None:
        self._slots = slots
        self._use = use
        # By session, of those used last: a session's tenant never changes.
        self._tenants: OrderedDict[str, str] = OrderedDict()

    async def apply(
        self,
        session_id: str,
        commit: RedisCommit,
        *,
        tokens: int | None,
        limits: TenantLimits = UNLIMITED,
        tenant: str | None = None,
        epoch: int | str = "",
        before: str = "",
        record: IdempotencyRecord | None = None,
    ) -> Applied:
        """Apply a commit after which the session has `tokens` (None: as before).

        `tenant` is that of a session that does not exist yet.
        """
        if tenant is None:
            tenant = await self._find_tenant(session_id)
        growth = Growth(session_id, commit.count_bytes(), tokens)
        await self._use.reserve(tenant, growth, limits)
        try:
            applied = await self._slots.apply(
                session_id, commit, epoch=epoch, before=before, record=record
            )
        except ServiceError as error:
            # After any other failure of the catalog the commit may stand.
            if not isinstance(error, CatalogError) or isinstance(error, ChangedMeanwhile):
                await self._use.release(tenant, growth)
            raise
        await self._use.settle(tenant, growth, applied.grown)
        return applied

    async def _find_tenant(self, session_id: str) -> str:
        known = self._tenants.pop(session_id, None)
        if known is None:
            _, found = await self._slots.read(session_id, ("HGET", META, "tenant"))
            if found is None:  # the commit says that there is no such session
                return ""
            known = found.decode()
        self._tenants[session_id] = known
        if len(self._tenants) > _TENANTS_KNOWN:
            self._tenants.popitem(last=False)
        return known
