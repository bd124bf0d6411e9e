"""Tenant of a request: a header that the routes can believe.

`gateway.http.authentication` sets it from the request's key, or lets a trusted proxy's pass; it never lets
a client's pass where keys are needed.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Header, Request, Response
from fastapi.routing import APIRoute

from gateway.http.bodies.parsing import ParsedRoute, RouteHandler
from services.access.principals import MAX_TENANT_LENGTH, TENANT_NAME
from services.service import SessionService

TENANT_HEADER = "X-Kvrecall-Tenant"
Tenant = Annotated[
    str,
    Header(
        alias=TENANT_HEADER,
        min_length=1,
        max_length=MAX_TENANT_LENGTH,
        pattern=f"^{TENANT_NAME}$",
        description="Tenant that owns the sessions; a tenant sees only its own. Believed from trusted "
        "proxies, and on loopback where there is no key; else the key's tenant counts. Omitted: the "
        "default tenant.",
    ),
]


def create_tenant_route(service: SessionService) -> type[APIRoute]:
    """Build a class of routes that refuse an unknown session before they receive the body.

    Another tenant's session is one. With an idempotency key the service decides: the request may
    have been answered before its session was deleted.
    """

    class TenantRoute(ParsedRoute):
        """A route that looks for its session first."""

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
    if session is not None and "Idempotency-Key" not in request.headers:
        await check(session, request.headers.get(TENANT_HEADER, ""))
