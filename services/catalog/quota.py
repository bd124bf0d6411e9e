"""Quotas that a catalog keeps in the commit that adds something to what a tenant has."""

from kvrecall.domain.errors import QuotaExceeded


def check_room(held: int, limit: int | None, what: str) -> None:
    """Raise QuotaExceeded if a tenant that holds so many may not have one more.

    `what` they are, in the plural. A limit of None is none.
    """
    if limit is not None and held >= limit:
        message = f"the tenant has {held} {what}; the limit is {limit}: delete some"
        raise QuotaExceeded(message, limit)
