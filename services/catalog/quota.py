"""Quotas that a catalog keeps in the write that adds something to what a tenant has."""

from dataclasses import asdict, dataclass

from kvrecall.domain.errors import QuotaExceeded


@dataclass(frozen=True)
class TenantUse:
    """What a tenant has: `tokens` of its sessions, `bytes` of all that the catalog stores of it."""

    sessions: int = 0
    conversations: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class TenantLimits:
    """The most that a tenant may have, in the units of `TenantUse`; None: any number."""

    sessions: int | None = None
    conversations: int | None = None
    tokens: int | None = None
    bytes: int | None = None

    def check(self, use: TenantUse) -> None:
        """Raise QuotaExceeded if a tenant would have more than it may, naming the first such limit."""
        limits = asdict(self)
        for what, held in asdict(use).items():
            limit = limits[what]
            if limit is not None and held > limit:
                raise build_refusal(what, held, limit)


# The limits of a write that is not refused for a quota.
UNLIMITED = TenantLimits()


def build_refusal(what: str, held: int, limit: int) -> QuotaExceeded:
    """Build the refusal of a tenant that would hold so many; `what` they are, in the plural."""
    what = "bytes in the catalog" if what == "bytes" else what
    message = f"the tenant would have {held} {what}; the limit is {limit}: delete some"
    return QuotaExceeded(message, limit)
