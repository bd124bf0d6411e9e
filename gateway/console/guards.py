"""Checks of requests that a browser may have been tricked into: the name asked, the page asking."""

from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import service_error_response
from kvrecall.domain.errors import ServiceError, WrongHost, WrongOrigin

_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
ANY = "*"


class BrowserGuard:
    """Refuses requests by a name that is not the service's, and writes of other sites' pages.

    A page of another site may have its own name resolve to this machine (DNS rebinding), whereupon
    a browser takes the service for that site: such a request has the site's name as its Host. And
    it may send a form, which a browser lets through without asking: such a write has its Origin.
    Clients other than browsers send the Host that they were configured with, and no Origin.

    `hosts`: names without ports; None: any. `origins`: pages of other sites that may write.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str] | None, origins: Collection[str]
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or ANY in hosts else frozenset(map(str.lower, hosts))
        self._origins = frozenset(origin.rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it before anything of it is read."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServiceError as error:
                await service_error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1").lower()
            elif name == b"origin":
                origin = value.decode("latin-1")
        if host and self._hosts is not None and get_name(host) not in self._hosts:
            raise WrongHost(
                f"the service is not known as {get_name(host)!r}: call it as localhost, or list the "
                "name in KVRECALL_GATEWAY__HOSTS"
            )
        if origin is not None and scope["method"] not in _READS:
            self._check_origin(origin, host or "")

    def _check_origin(self, origin: str, host: str) -> None:
        if ANY in self._origins or origin in self._origins:
            return
        scheme, netloc = _split_origin(origin)
        if netloc and netloc == host.removesuffix(_DEFAULT_PORTS.get(scheme, "")):
            return
        raise WrongOrigin(
            f"a page of {origin!r} may not write here: its origin is not the address that was "
            "called; if it may, list it in KVRECALL_GATEWAY__CORS_ORIGINS"
        )


def get_name(host: str) -> str:
    """Return the name or address of a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _split_origin(origin: str) -> tuple[str, str]:
    """Return the scheme and the address of an origin; both empty for `null` and other opaque ones."""
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return "", ""
    netloc = parts.netloc
    return parts.scheme, netloc.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ""))
