"""Request ids and the access log, around every request."""

import random
import re
import time
from collections.abc import Callable, Iterable

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import error_response, log_unexpected_error
from gateway.openai.errors import is_openai_path
from gateway.scopes import get_path

_REQUEST_ID = b"x-request-id"
# The name under which Anthropic's clients read it.
_OTHER_REQUEST_ID = b"request-id"
# Logged status of a request whose client disconnected before the response; never sent.
CLIENT_CLOSED_REQUEST = 499
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Ids that the service makes: of sessions, responses and the like.
_OWN_ID = re.compile(r"[a-z]{1,8}_[A-Za-z0-9]{8,64}")
_random = random.Random()
RequestObserver = Callable[[str, int], None]


class RequestLog:
    """Request ids and the access log.

    A request gets an id (the client's, if it is plain ASCII) and one log line with its status and
    seconds. `observer` is called with the method and the status. An unexpected exception is logged
    with the id and becomes a problem response.
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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                names = (_REQUEST_ID, _OTHER_REQUEST_ID)
                ids = [(name, request_id.encode()) for name in names]
                if is_openai_path(scope["path"]):
                    ids += build_openai_headers(time.monotonic() - started)
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        bound = structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            members = log_unexpected_error()
            if status:  # the response has begun: the server closes the connection
                raise
            await error_response(scope["path"], members)(scope, receive, send_with_id)
        finally:
            self._log_request(scope, status or CLIENT_CLOSED_REQUEST, time.monotonic() - started)
            structlog.contextvars.reset_contextvars(**bound)

    def _log_request(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"]
        if self._words is None:
            self._words = _get_words(scope["app"].routes)
        path = shorten_path(scope["path"], self._words)
        self._observer(method, status)
        self._log.info(
            "request", method=method, path=path, status=status, seconds=round(seconds, 6)
        )


def build_openai_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    """Build the headers that every answer of OpenAI's API has; `seconds`: until its first byte."""
    return [
        (b"openai-version", b"2020-10-01"),
        (b"openai-processing-ms", str(round(1000 * seconds)).encode()),
    ]


def shorten_path(path: str, words: frozenset[str]) -> str:
    """Replace what a client chose in a path by `*`: words of routes stay, and ids of ours."""
    parts = [part if part in words or _OWN_ID.fullmatch(part) else "*" for part in path.split("/")]
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
