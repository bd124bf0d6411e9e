"""Routes of the APIs: those under /v1, and the two of tokens."""

from fastapi import APIRouter
from starlette.routing import BaseRoute

from gateway.anthropic.errors import ANTHROPIC_FORMAT
from gateway.anthropic.errors import error_responses as anthropic_responses
from gateway.anthropic.routes import add_anthropic_routes
from gateway.http.bodies.parsing import ParsedRoute
from gateway.http.errors import problem_responses
from gateway.http.settings import GatewaySettings
from gateway.http.tenant_routes import create_tenant_route
from gateway.openai.errors import OPENAI_FORMAT, error_responses
from gateway.openai.routes import add_openai_routes
from gateway.openai.tokens import add_token_routes
from gateway.rest.routes.events import add_event_routes
from gateway.rest.routes.reading import add_reading_routes
from gateway.rest.routes.sessions import add_session_reads, add_session_routes
from gateway.rest.routes.turns import add_turn_routes
from gateway.rest.routes.watching import add_watching_routes
from gateway.rest.routes.workers import add_worker_routes
from services.service import SessionService

VENDOR_FORMATS = (OPENAI_FORMAT, ANTHROPIC_FORMAT)
"""The forms of the other vendors' APIs."""

_PREFIX = "/v1"
_STATUSES = (400, 401, 403, 408, 413, 422, 429, 500, 503)
_CLIENT_STATUSES = (400, 401, 403, 404, 408, 409, 413, 429, 500, 503)


def create_routes(service: SessionService, settings: GatewaySettings) -> list[BaseRoute]:
    """Build all routes of the APIs, the most frequent ones first.

    Each passes its tenant on to the service, which knows no other's sessions. Turns and reads of a
    session do no more, as a look at the session before the body would be one read more. A flat
    list: a router that includes others matches a request against all of its routes once more for
    each level.
    """
    own = APIRouter(
        prefix=_PREFIX, responses=problem_responses(*_STATUSES), route_class=ParsedRoute
    )
    add_turn_routes(own, service, settings)
    add_session_reads(own, service)
    reading = APIRouter(
        prefix=_PREFIX, responses=problem_responses(*_STATUSES), route_class=ParsedRoute
    )
    add_reading_routes(reading, service)
    add_watching_routes(reading, service, settings)
    openai = APIRouter(
        prefix=_PREFIX, responses=error_responses(*_CLIENT_STATUSES), route_class=ParsedRoute
    )
    add_openai_routes(openai, service, settings)
    tokens = APIRouter(responses=error_responses(*_CLIENT_STATUSES), route_class=ParsedRoute)
    add_token_routes(tokens, service, settings)
    anthropic = APIRouter(
        prefix=_PREFIX, responses=anthropic_responses(*_CLIENT_STATUSES), route_class=ParsedRoute
    )
    add_anthropic_routes(anthropic, service, settings)
    checked = APIRouter(
        prefix=_PREFIX,
        responses=problem_responses(*_STATUSES),
        route_class=create_tenant_route(service),
    )
    add_event_routes(checked, service)
    add_session_routes(checked, service)
    add_worker_routes(checked, service)
    return [
        *own.routes,
        *openai.routes,
        *tokens.routes,
        *anthropic.routes,
        *checked.routes,
        *reading.routes,
    ]
