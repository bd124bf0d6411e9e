"""Tenant of a request: a header, to be set by a trusted proxy so that clients cannot choose it."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header, Request

from services.service import SessionService

TENANT_HEADER = "X-Kvrecall-Tenant"
Tenant = Annotated[
    str,
    Header(
        alias=TENANT_HEADER,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Tenant that owns the sessions; a tenant sees only its own. "
        "Omitted: the default tenant.",
    ),
]


def create_tenant_check(service: SessionService) -> Callable[..., Awaitable[None]]:
    """Build a dependency that responds to another tenant's session as to an unknown one."""

    async def check_tenant(request: Request, tenant: Tenant = "") -> None:
        session = request.path_params.get("session")
        if session is not None:
            await service.check_tenant(session, tenant)

    return check_tenant
