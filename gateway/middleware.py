"""Middleware of every request: request id, access log, body size limit, strict JSON."""

import random
import re
import time
from collections.abc import Callable

import structlog
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import build_problem, log_unexpected_error, problem_response
from kvrecall.domain.codes import ErrorCode

_REQUEST_ID = b"x-request-id"
# Logged status of a request whose client disconnected before the response; never sent.
CLIENT_CLOSED_REQUEST = 499
_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
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
                message["headers"] = [*message["headers"], (_REQUEST_ID, request_id.encode())]
            await send(message)

        bound = structlog.contextvars.bind_contextvars(request_id=request_id)
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            members = log_unexpected_error()
            if status:  # the response has begun: the server closes the connection
                raise
            await problem_response(members)(scope, receive, send_with_id)
        finally:
            self._log_request(scope, status or CLIENT_CLOSED_REQUEST, time.monotonic() - started)
            structlog.contextvars.reset_contextvars(**bound)

    def _log_request(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"]
        path = scope["path"]
        self._observer(method, status)
        self._log.info(
            "request", method=method, path=path, status=status, seconds=round(seconds, 6)
        )


def _get_request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID:
            given = str(value, "latin-1")
            return given if _PLAIN_ID.fullmatch(given) else _new_request_id()
    return _new_request_id()


def _new_request_id() -> str:
    return f"{_random.getrandbits(64):016x}"  # unique, not secret


class StrictBody:
    """Body size limit and strict JSON: other bodies are rejected before they reach a route.

    Python's JSON parser accepts NaN and lone surrogates, which neither the catalog nor protobuf can
    represent.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and check the body, then pass the request on with the body in one piece."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            body = (
                None
                if _get_content_length(headers) > self._max_bytes
                else await self._read(receive)
            )
        except ClientDisconnect:
            return
        if body is None:
            detail = f"the body exceeds the limit of {self._max_bytes} bytes"
            members = build_problem(
                ErrorCode.BODY_TOO_LARGE, detail, {"field": "body", "limit": self._max_bytes}
            )
            await problem_response(members, {"Connection": "close"})(scope, receive, send)
            return
        if body and (reason := _find_json_error(headers, body)) is not None:
            members = build_problem(
                ErrorCode.MALFORMED_JSON,
                f"the body is not JSON in UTF-8: {reason}",
                {"field": "body"},
            )
            await problem_response(members)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Read the whole body; None when it exceeds the limit. Raises ClientDisconnect."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):
                return bytes(body)


def _get_content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


def _find_json_error(headers: Headers, body: bytes) -> str | None:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return None
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        return str(error)
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receive the body in one piece, then the server's own messages (a disconnect)."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
