"""Who sends a request, and what the sender may do."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from kvrecall.domain.errors import InsufficientScope


class Scope(StrEnum):
    """A right of a key."""

    INFER = "infer"
    SESSIONS = "sessions"
    ADMIN = "admin"


TENANT_NAME = r"[A-Za-z0-9._-]+"
MAX_TENANT_LENGTH = 64
ALL_SCOPES = frozenset(Scope)
_PROGRAM = re.compile(r"[\w.+-]{1,40}(/[\w.+-]{1,40})?", re.ASCII)


@dataclass(frozen=True)
class Credentials:
    """What a request says of its sender: the key, the name of a tenant, the address of the peer.

    `peer` is the address of the connection itself, never one that a header claims.
    """

    key: str | None
    tenant: str | None
    peer: str

    def __repr__(self) -> str:
        return f"Credentials(tenant={self.tenant!r}, peer={self.peer!r})"


@dataclass(frozen=True)
class Principal:
    """The sender of a request. `key` is the id of its key, empty without one.

    `api` is the API that it was sent through, and `client` the program that sent it, by its own word;
    empty where they are not known.
    """

    tenant: str
    scopes: frozenset[Scope] = ALL_SCOPES
    key: str = ""
    api: str = ""
    client: str = ""

    def require(self, scopes: Iterable[Scope]) -> None:
        """Raise InsufficientScope unless the principal has one of the scopes."""
        wanted = sorted(scopes)
        if not self.scopes.intersection(wanted):
            raise InsufficientScope(wanted)


def name_client(user_agent: str) -> str:
    """Return the program that a request's `User-Agent` names first, as `name/version`, if it is plain."""
    found = _PROGRAM.match(user_agent)
    return "" if found is None else found[0]


def is_tenant_name(name: str) -> bool:
    """Return whether a tenant may have this name; the default tenant's is empty."""
    return len(name) <= MAX_TENANT_LENGTH and re.fullmatch(TENANT_NAME, name) is not None


_current: ContextVar[Principal | None] = ContextVar("kvrecall_principal", default=None)


@contextmanager
def acting_as(principal: Principal) -> Iterator[None]:
    """Make the principal the current one, in the context and in the tasks that it starts."""
    token = _current.set(principal)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_principal() -> Principal | None:
    """Return the principal of the request that runs here, None outside of requests."""
    return _current.get()
