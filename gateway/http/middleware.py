"""Request ids and the access log, around every request."""

import asyncio
import random
import re
import time
from collections.abc import Iterable
from typing import Protocol

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import (
    error_response,
    find_format,
    log_unexpected_error,
    service_error_response,
)
from gateway.observation.identity import OWN_ID, get_path
from gateway.observation.spans import PROBES
from kvrecall.domain.errors import ShuttingDown

_REQUEST_ID = b"x-request-id"
# The name under which Anthropic's clients read it.
_OTHER_REQUEST_ID = b"request-id"
# Logged status of a request whose client disconnected before the response; never sent.
CLIENT_CLOSED_REQUEST = 499
# Another gateway takes a request at once; this one is back when it has started again.
_RETRY_SECONDS = 1.0
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_random = random.Random()
# The label of requests that match no route: their paths are their senders' choice.
UNMATCHED = "unmatched"


class RequestObserver(Protocol):
    """Counts requests."""

    def begin_request(self) -> None:
        """Note that a request has come."""
        ...

    def end_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Note its end; `route` is the path of its route, `seconds` the time to its response's start."""
        ...


class RequestLog:
    """Request ids and the access log.

    A request gets an id (the client's, if it is plain ASCII) and one log line with its status and
    seconds, and `observer` counts it. An unexpected exception is logged with the id and becomes a
    problem response; so does the end of the service before the answer.
    """

    def __init__(self, app: ASGIApp, observer: RequestObserver) -> None:
        self._app = app
        self._observer = observer
        self._log = structlog.get_logger("kvrecall.access")
        self._words: frozenset[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request. Re-raises an exception when the response has begun already."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _get_request_id(scope)
        started = time.monotonic()
        status = 0
        began_after = 0.0  # seconds to the response's beginning

        async def send_with_id(message: Message) -> None:
            nonlocal status, began_after
            if message["type"] == "http.response.start":
                status = message["status"]
                began_after = time.monotonic() - started
                names = (_REQUEST_ID, _OTHER_REQUEST_ID)
                ids = [(name, request_id.encode()) for name in names]
                if (vendor := find_format(scope)) is not None:
                    ids += vendor.build_headers(began_after)
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        self._observer.begin_request()
        bound = structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not status:  # the time of a drain is over, and the server ends what runs yet
                stopped = ShuttingDown(
                    "the service stopped before the answer was there; send the request again",
                    _RETRY_SECONDS,
                )
                await service_error_response(scope, stopped)(scope, receive, send_with_id)
            raise
        except Exception:
            members = log_unexpected_error()
            if status:  # the response has begun: the server closes the connection
                raise
            await error_response(scope, members)(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            shown = status or CLIENT_CLOSED_REQUEST
            route = get_path(scope["route"]) if "route" in scope else UNMATCHED
            self._log_request(scope, route, shown, seconds)
            self._observer.end_request(scope["method"], route, shown, began_after or seconds)
            structlog.contextvars.reset_contextvars(**bound)
            structlog.contextvars.unbind_contextvars("tenant")

    def _log_request(self, scope: Scope, route: str, status: int, seconds: float) -> None:
        method = scope["method"]
        if self._words is None:
            self._words = _get_words(scope["app"].routes)
        path = shorten_path(scope["path"], self._words)
        log = self._log.debug if scope["path"] in PROBES else self._log.info
        log(
            "request",
            method=method,
            path=path,
            route=route,
            status=status,
            seconds=round(seconds, 6),
        )


def shorten_path(path: str, words: frozenset[str]) -> str:
    """Replace what a client chose in a path by `*`: words of routes stay, and ids of ours."""
    parts = [part if part in words or OWN_ID.fullmatch(part) else "*" for part in path.split("/")]
    return "/".join(parts)


def _get_words(routes: Iterable[BaseRoute]) -> frozenset[str]:
    parts = [part for route in routes for part in get_path(route).split("/")]
    return frozenset(part for part in parts if "{" not in part)


def _get_request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID:
            return choose_request_id(str(value, "latin-1"))
    return choose_request_id(None)


def choose_request_id(given: str | None) -> str:
    """Return the id that a client gave its request if it is plain ASCII, else a new one."""
    if given is not None and _PLAIN_ID.fullmatch(given):
        return given
    return f"{_random.getrandbits(64):016x}"  # unique, not secret
