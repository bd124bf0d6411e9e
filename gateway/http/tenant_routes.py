"""Routes that look for a tenant's session before they receive the body."""

from collections.abc import Awaitable, Callable

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gateway.http.bodies.parsing import ParsedRoute, RouteHandler
from gateway.http.tenants import TENANT_HEADER
from services.service import SessionService


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
