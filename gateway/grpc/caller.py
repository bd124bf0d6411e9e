"""The caller of a gRPC call, by its metadata: tenant and request id."""

from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import build_problem
from gateway.grpc.errors import CallRefused
from gateway.middleware import choose_request_id
from gateway.tenants import is_tenant_name
from kvrecall.domain.codes import ErrorCode
from kvrecall.protocol.sessions_v1 import REQUEST_ID_KEY, TENANT_KEY

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Caller:
    """The tenant in whose name a call is made; empty: the default tenant."""

    tenant: str = ""


def read_caller(metadata: Metadata) -> Caller:
    """Read the caller from a call's metadata. Raises CallRefused."""
    tenant = _get(metadata, TENANT_KEY)
    if tenant is None:
        return Caller()
    if not is_tenant_name(tenant):
        detail = f"{TENANT_KEY}: 1 to 64 letters, digits, dots, dashes and underscores"
        raise CallRefused(build_problem(ErrorCode.INVALID_REQUEST, detail, {"field": TENANT_KEY}))
    return Caller(tenant)


def read_request_id(metadata: Metadata) -> str:
    """Return the id that the client gave its call if it is plain text, else a new one."""
    return choose_request_id(_get(metadata, REQUEST_ID_KEY))


def _get(metadata: Metadata, key: str) -> str | None:
    """Return the last value of a key, of which metadata may have several."""
    found = [value for name, value in metadata if name == key]
    return str(found[-1]) if found else None
