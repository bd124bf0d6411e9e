"""Shares of the service that requests have."""

from kvrecall.domain.fairness.share import Share
from kvrecall.domain.limits import ServiceLimits
from services.access.principals import get_current_principal


def get_share(
    limits: ServiceLimits, tenant: str, session: str = "", *, background: bool = False
) -> Share:
    """Return the share of a tenant's work: within it keys share evenly, or sessions without keys."""
    principal = get_current_principal()
    key = "" if principal is None else principal.key
    return Share(tenant, key or session, limits.get_weight(tenant), background)
