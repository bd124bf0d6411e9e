"""Tenant of a request: a header, to be set by a trusted proxy so that clients cannot choose it."""

import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Annotated, Any

from fastapi import Header, Request, Response
from fastapi.routing import APIRoute

from services.service import SessionService

TENANT_HEADER = "X-Kvrecall-Tenant"
_NAME = r"^[A-Za-z0-9._-]+$"
_MAX_LENGTH = 64
Tenant = Annotated[
    str,
    Header(
        alias=TENANT_HEADER,
        min_length=1,
        max_length=_MAX_LENGTH,
        pattern=_NAME,
        description="Tenant that owns the sessions; a tenant sees only its own. "
        "Omitted: the default tenant.",
    ),
]
RouteHandler = Callable[[Request], Coroutine[Any, Any, Response]]


async def document_tenant(tenant: Tenant = "") -> None:
    """Validate the header, and describe it in OpenAPI: the dependency of a `TenantRoute`."""


def create_tenant_route(service: SessionService) -> type[APIRoute]:
    """Build a class of routes that respond to another tenant's session as to an unknown one.

    They do so before they receive the body, which the framework does before any dependency.
    """

    class TenantRoute(APIRoute):
        """A route that checks the tenant of its session first."""

        def get_route_handler(self) -> RouteHandler:
            """Return the route's handler behind the check."""
            handle = super().get_route_handler()

            async def handle_checked(request: Request) -> Response:
                await _check(service.check_tenant, request)
                return await handle(request)

            return handle_checked

    return TenantRoute


async def _check(check: Callable[[str, str], Awaitable[None]], request: Request) -> None:
    session = request.path_params.get("session")
    tenant = request.headers.get(TENANT_HEADER, "")
    if session is None or (tenant and not is_tenant_name(tenant)):
        return  # a malformed name is refused with the other parameters
    await check(session, tenant)


def is_tenant_name(tenant: str) -> bool:
    """Return whether a text can be a tenant's name."""
    return len(tenant) <= _MAX_LENGTH and re.match(_NAME, tenant) is not None
