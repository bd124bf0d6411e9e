"""Whose a request is: a header that whoever runs a proxy in front sets, and clients then cannot choose."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header, Request

from services.service import SessionService

TENANT = "X-Kvrecall-Tenant"
Tenant = Annotated[
    str,
    Header(
        alias=TENANT,
        min_length=1,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="Whose sessions these are; each tenant sees only its own. Left out: the one tenant without a name.",
    ),
]


def own_session(service: SessionService) -> Callable[..., Awaitable[None]]:
    """A dependency for routes: a session in the path that is another tenant's is answered as an unknown one."""

    async def check(request: Request, tenant: Tenant = "") -> None:
        session = request.path_params.get("session")
        if session is not None:
            await service.check_tenant(session, tenant)

    return check
