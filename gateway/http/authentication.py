"""Authentication of requests: key, scope, rate and room, before any route sees one."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import find_format, service_error_response
from gateway.http.scopes import get_rule
from gateway.http.tenants import TENANT_HEADER
from gateway.observation.identity import bind_tenant
from kvrecall.domain.errors import InvalidRequest, ServiceError
from services.access.control import AccessControl
from services.access.principals import Credentials, Principal, acting_as, name_client
from services.access.rates import RateReport, Window

_TENANT = TENANT_HEADER.lower().encode()
_AUTHORIZATION = b"authorization"
_API_KEY = b"x-api-key"
_IDEMPOTENCY_KEY = b"idempotency-key"
_USER_AGENT = b"user-agent"
_CREDENTIALS = frozenset({_TENANT, _AUTHORIZATION, _API_KEY})


class Authentication:
    """Admits requests, each as its principal, and tells what is left of the principal's rates.

    Routes find the principal's tenant in the header `X-Kvrecall-Tenant`, whatever the client sent. A
    turn that would be refused for want of room is refused here, before its body is read: so a tenant
    that floods takes little of the event loop from others.
    """

    def __init__(
        self, app: ASGIApp, access: AccessControl, check_room: Callable[[str], None]
    ) -> None:
        """`check_room` raises Overloaded if a tenant's turn that came now would be refused."""
        self._app = app
        self._access = access
        self._check_room = check_room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request; one that is refused is answered without a look at its body."""
        rule = get_rule(scope["path"]) if scope["type"] == "http" else None
        if rule is None or not rule.scopes:
            await self._app(scope, receive, send)
            return
        computes = rule.computes and scope["method"] == "POST"
        try:
            admitted = await self._access.admit(
                _read_credentials(scope), rule.scopes, computes=computes, monitors=rule.monitors
            )
            # One with a key may have been answered already, which needs no room.
            if computes and all(name != _IDEMPOTENCY_KEY for name, _ in scope["headers"]):
                self._check_room(admitted.principal.tenant)
        except ServiceError as error:
            await service_error_response(scope, error)(scope, receive, send)
            return
        lines = build_rate_headers(admitted.rates)

        async def send_with_rates(message: Message) -> None:
            if lines and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(lines)
            await send(message)

        with acting_as(_describe_sender(admitted.principal, scope)):
            bind_tenant(admitted.principal.tenant)
            # In place: middleware around this one reads the route from the scope afterwards.
            scope["headers"] = _set_tenant(scope["headers"], admitted.principal.tenant)
            await self._app(scope, receive, send_with_rates)


def build_rate_headers(rates: RateReport) -> dict[str, str]:
    """Build `x-ratelimit-...` as OpenAI's API has them, for the limits that there are."""
    return {
        **_build_window_headers("requests", rates.requests),
        **_build_window_headers("tokens", rates.tokens),
    }


def _build_window_headers(what: str, window: Window | None) -> dict[str, str]:
    if window is None:
        return {}
    return {
        f"x-ratelimit-limit-{what}": str(window.limit),
        f"x-ratelimit-remaining-{what}": str(window.remaining),
        f"x-ratelimit-reset-{what}": f"{window.reset_seconds:.3f}s",
    }


def _read_credentials(scope: Scope) -> Credentials:
    """Read who a request says it is from. Raises InvalidRequest for several tenants.

    A proxy that adds its header to the client's own instead of replacing it must not be believed.
    """
    given: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in _CREDENTIALS:
            if name == _TENANT and name in given:
                raise InvalidRequest(TENANT_HEADER, f"the header {TENANT_HEADER} may be sent once")
            given.setdefault(name, value.decode("latin-1"))
    scheme, _, bearer = given.get(_AUTHORIZATION, "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    client = scope.get("client")
    return Credentials(
        key or given.get(_API_KEY) or None, given.get(_TENANT), client[0] if client else ""
    )


def _describe_sender(principal: Principal, scope: Scope) -> Principal:
    """Add the API and the client of a request to its principal."""
    vendor = find_format(scope)
    agent = next((value for name, value in scope["headers"] if name == _USER_AGENT), b"")
    api = "rest" if vendor is None else vendor.name
    return replace(principal, api=api, client=name_client(agent.decode("latin-1")))


def _set_tenant(headers: Iterable[tuple[bytes, bytes]], tenant: str) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name != _TENANT]
    return [*others, (_TENANT, tenant.encode())] if tenant else others
