"""What happens to every request: an id, an access log line, a bound on its body, and strict JSON."""

import re
import secrets
import time
from collections.abc import Callable

import structlog
from pydantic_core import from_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import problem, problem_response, unexpected
from kvrecall.domain.codes import ErrorCode

REQUEST_ID = "x-request-id"
CLIENT_GONE = 499  # not sent to anybody: the client left before there was an answer
_PLAIN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
RequestObserver = Callable[[str, int], None]


class RequestLog:
    """Gives each request an id (the client's, if it sent a plain one), and writes one line when it is answered.

    `observer` is told the method and the status. An exception that nobody foresaw is logged here, with the id, and
    answered as a problem.
    """

    def __init__(self, app: ASGIApp, observer: RequestObserver) -> None:
        self._app = app
        self._observer = observer
        self._log = structlog.get_logger("kvrecall.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                members = unexpected()
                if status:  # the answer has begun: all that is left is to break the connection off
                    raise
                await problem_response(members)(scope, receive, send_with_id)
            finally:
                self._note(scope, status or CLIENT_GONE, time.monotonic() - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        method = scope["method"]
        path = scope["path"]
        self._observer(method, status)
        self._log.info(
            "request", method=method, path=path, status=status, seconds=round(seconds, 6)
        )


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _PLAIN.fullmatch(given) else secrets.token_hex(8)


class StrictBody:
    """Reads the body, up to a limit in bytes, and refuses what is no JSON in UTF-8 before any route sees it.

    Python's own parser lets NaN and lone surrogates through, which neither the catalog nor the wire can carry.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            body = None if _declared(headers) > self._max_bytes else await self._read(receive)
        except ClientDisconnect:
            return
        if body is None:
            detail = f"the body is over the limit of {self._max_bytes} bytes"
            members = problem(
                ErrorCode.BODY_TOO_LARGE, detail, {"field": "body", "limit": self._max_bytes}
            )
            await problem_response(members, {"Connection": "close"})(scope, receive, send)
            return
        if body and (fault := _json_fault(headers, body)) is not None:
            members = problem(
                ErrorCode.MALFORMED_JSON,
                f"the body is not JSON in UTF-8: {fault}",
                {"field": "body"},
            )
            await problem_response(members)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None when it is over the limit. Raises ClientDisconnect when it breaks off."""
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


def _declared(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0


def _json_fault(headers: Headers, body: bytes) -> str | None:
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        return None
    try:
        from_json(body, allow_inf_nan=False)
    except ValueError as error:
        return str(error)
    return None


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, then whatever the server has to say (that the client went away)."""
    told = False

    async def replay() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
