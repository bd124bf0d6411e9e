"""Router of the REST API under /v1."""

from fastapi import APIRouter, Depends

from gateway.errors import problem_responses
from gateway.rest.routes.events import add_event_routes
from gateway.rest.routes.sessions import add_session_routes
from gateway.rest.routes.turns import add_turn_routes
from gateway.rest.routes.workers import add_worker_routes
from gateway.settings import GatewaySettings
from gateway.tenants import create_tenant_check
from services.service import SessionService


def create_router(service: SessionService, settings: GatewaySettings) -> APIRouter:
    """Build the router with all routes under /v1; each checks the tenant of its session.

    Turns pass the tenant on, so that the check needs no read of the session of its own.
    """
    router = APIRouter(prefix="/v1", responses=problem_responses(400, 413, 422, 500, 503))
    add_turn_routes(router, service, settings)
    checked = APIRouter(dependencies=[Depends(create_tenant_check(service))])
    add_session_routes(checked, service)
    add_event_routes(checked, service)
    add_worker_routes(checked, service)
    router.include_router(checked)
    return router
