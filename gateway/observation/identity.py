"""What of a request may be written to logs and traces: ids of ours, and tenants as a digest."""

import re
from hashlib import sha256

import structlog
from starlette.routing import BaseRoute

# Ids that the service makes: of sessions, responses and the like.
OWN_ID = re.compile(r"[a-z]{1,8}_[A-Za-z0-9]{8,64}")
_DIGEST_DIGITS = 8


def bind_tenant(tenant: str) -> None:
    """Add a tenant's digest to the log lines of the current request; none for the default tenant."""
    if tenant:
        structlog.contextvars.bind_contextvars(tenant=digest_tenant(tenant))


def digest_tenant(tenant: str) -> str:
    """Return the first digits of a tenant's SHA-256: lines are found by it, and say no name."""
    return sha256(tenant.encode()).hexdigest()[:_DIGEST_DIGITS]


def hide_foreign(text: str) -> str:
    """Return an id of ours as it is, and `*` for what a client chose."""
    return text if OWN_ID.fullmatch(text) else "*"


def get_path(route: BaseRoute) -> str:
    """Return the path of a route, with its parameters in braces."""
    return str(getattr(route, "path", ""))
