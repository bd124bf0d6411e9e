"""The caller of a gRPC call: its credentials, its request id, and the scopes that the call needs."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from urllib.parse import unquote

from gateway.http.middleware import choose_request_id
from gateway.http.scopes import Rule, get_rule
from kvrecall.domain.errors import InvalidRequest
from kvrecall.protocol.sessions_v1 import REQUEST_ID_KEY, TENANT_KEY
from services.access.principals import Credentials, name_client

Metadata = Iterable[tuple[str, str | bytes]]

# The route of the REST API that does the same: the table of scopes is written once, by routes.
_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "CreateSession": "/v1/sessions",
        "GetSession": "/v1/sessions/{session}",
        "ListSessions": "/v1/sessions",
        "DeleteSession": "/v1/sessions/{session}",
        "ForkSession": "/v1/sessions/{session}/fork",
        "MoveSession": "/v1/sessions/{session}/move",
        "SendTurn": "/v1/sessions/{session}/turns",
        "StreamTurn": "/v1/sessions/{session}/turns",
        "SendEvent": "/v1/sessions/{session}/events",
        "GetMemory": "/v1/sessions/{session}/memory",
        "ListRepairs": "/v1/sessions/{session}/repairs",
        "ListEpisodes": "/v1/sessions/{session}/episodes",
        "GetModel": "/v1/worker",
        "ListMethods": "/v1/methods",
        "ListWorkers": "/v1/workers",
    }
)


def get_rule_of_call(name: str) -> Rule:
    """Return the rule of a call. Raises KeyError for one without a route."""
    return get_rule(_ROUTES[name])


def read_credentials(metadata: Metadata, peer: str) -> Credentials:
    """Read who a call says it is from. Raises InvalidRequest for several tenants.

    `peer` is gRPC's name of the connection's other end. A proxy that adds a tenant to the client's
    own instead of replacing it must not be believed.
    """
    tenants = _get_all(metadata, TENANT_KEY)
    if len(tenants) > 1:
        raise InvalidRequest(TENANT_KEY, f"{TENANT_KEY} may be sent once")
    scheme, _, bearer = (_get_all(metadata, "authorization") or [""])[0].partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    other = (_get_all(metadata, "x-api-key") or [""])[0]
    return Credentials(key or other or None, tenants[0] if tenants else None, _read_address(peer))


def read_client(metadata: Metadata) -> str:
    """Return the program that a call's client says that it is."""
    return name_client((_get_all(metadata, "user-agent") or [""])[0])


def read_request_id(metadata: Metadata) -> str:
    """Return the id that the client gave its call if it is plain text, else a new one."""
    found = _get_all(metadata, REQUEST_ID_KEY)
    return choose_request_id(found[-1] if found else None)


def _read_address(peer: str) -> str:
    """Return the address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


def _get_all(metadata: Metadata, key: str) -> list[str]:
    return [str(value) for name, value in metadata if name == key]
