"""Quotas that a catalog keeps in the write that adds something to what a tenant has."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from kvrecall.domain.errors import QuotaExceeded

Countable = Literal["sessions", "conversations", "tokens", "bytes"]
COUNTABLES: tuple[Countable, ...] = get_args(Countable)


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

    def check(self, use: TenantUse, grown: Iterable[Countable]) -> None:
        """Raise QuotaExceeded if a tenant has more than it may of what a write has `grown`.

        A limit that was lowered refuses only writes that add to what it limits.
        """
        for what in grown:
            held, limit = getattr(use, what), getattr(self, what)
            if limit is not None and held > limit:
                raise build_refusal(what, held, limit)


# The limits of a write that is not refused for a quota.
UNLIMITED = TenantLimits()


def build_refusal(what: Countable, held: int, limit: int) -> QuotaExceeded:
    """Build the refusal of a tenant that would hold so many."""
    named = "bytes in the catalog" if what == "bytes" else what
    message = f"the tenant would have {held} {named}; the limit is {limit}: delete some"
    return QuotaExceeded(message, limit, what)
