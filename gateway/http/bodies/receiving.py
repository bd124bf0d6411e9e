"""Receiving of request bodies, within limits of size, time and memory."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.bodies.inflation import ACCEPTED, Inflater, find_inflater
from gateway.http.bodies.parsing import BodyParser
from gateway.http.errors import RefusedRequest, build_problem
from gateway.http.settings import GatewaySettings
from gateway.http.tenants import TENANT_HEADER
from kvrecall.domain.codes import ErrorCode
from kvrecall.sandbox.tenant_queue import QueueFull

_RETRY_AFTER = {"Retry-After": "1"}
# What begins a value of JSON or ends one: more of these than values of it.
_VALUE_MARKS = (b",", b"[", b"{")


class BodyRefused(RefusedRequest):
    """A body that no route gets."""

    def __init__(
        self, code: ErrorCode, detail: str, headers: dict[str, str] | None = None, **details: object
    ) -> None:
        super().__init__(build_problem(code, detail, {"field": "body", **details}), headers)


class BodyBuffer:
    """Accounts for the bytes of all bodies in memory: those being received, and those in use.

    When they exceed `max_bytes`, the unfinished body that has taken longest is refused, so that
    slow clients cannot keep the buffer from quick ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._receiving: dict[Body, None] = {}  # the oldest first

    @contextmanager
    def hold(self) -> Iterator["Body"]:
        """Hold the bytes of one body until its request has ended."""
        body = Body(self)
        try:
            yield body
        finally:
            self._receiving.pop(body, None)
            self._used -= body.size

    def begin(self, body: "Body") -> None:
        """Note that a body begins to be received."""
        self._receiving[body] = None

    def add(self, body: "Body", chunk: bytes) -> None:
        """Append to a body. Raises BodyRefused if it is the one that has to go."""
        body.append(chunk)
        self._used += len(chunk)
        while self._used > self._max_bytes:
            oldest = next(iter(self._receiving))  # `body` is one of them
            self._drop(oldest)
            if oldest is body:
                raise _no_memory()
            oldest.cancel()

    def end(self, body: "Body") -> None:
        """Note that a body is complete: it is not refused any more."""
        self._receiving.pop(body, None)

    def _drop(self, body: "Body") -> None:
        del self._receiving[body]
        self._used -= body.size
        body.clear()


class Body:
    """A request body, received on demand. `size` is the number of bytes that count as held."""

    def __init__(self, buffer: BodyBuffer) -> None:
        self._buffer = buffer
        self._timeout: asyncio.Timeout | None = None
        self._dropped = False
        self._content = bytearray()  # a list of many small pieces would take far more than them
        self.size = 0
        self.values = 0

    def append(self, chunk: bytes) -> None:
        """Append bytes, and count their values as JSON: at most so many."""
        self._content += chunk
        self.size += len(chunk)
        self.values += sum(map(chunk.count, _VALUE_MARKS))

    def clear(self) -> None:
        """Forget the bytes."""
        self._content.clear()
        self.size = 0

    def take(self) -> bytes:
        """Return the content, which its request holds from now on."""
        content = bytes(self._content)
        self._content.clear()
        return content

    def cancel(self) -> None:
        """Refuse it: others need the memory."""
        self._dropped = True
        assert self._timeout is not None, "only a body that is being received is refused"
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def receive(
        self, receive: Receive, settings: GatewaySettings, inflater: Inflater
    ) -> None:
        """Receive the whole body, inflated. Raises BodyRefused, ClientDisconnect."""
        self._buffer.begin(self)
        try:
            async with asyncio.timeout(settings.body_seconds) as self._timeout:
                await self._receive_all(receive, settings, inflater)
        except TimeoutError as error:
            if self._dropped:
                raise _no_memory() from error
            raise _too_slow(settings.body_seconds) from error
        finally:
            self._buffer.end(self)

    async def _receive_all(
        self, receive: Receive, settings: GatewaySettings, inflater: Inflater
    ) -> None:
        max_bytes = settings.max_body_bytes
        more = True
        empty = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            piece = message.get("body", b"")
            empty = empty and not piece
            try:
                # One byte over the limit tells that there is more.
                chunk = inflater.inflate(piece, max_bytes + 1 - self.size)
            except ValueError as error:
                raise _not_inflated(str(error)) from error
            self._buffer.add(self, chunk)
            if self.size > max_bytes:
                raise _too_large(max_bytes)
            if self.values > settings.max_body_values:
                raise _too_many_values(settings.max_body_values)
            more = message.get("more_body", False)
        if not (empty or inflater.complete):
            raise _not_inflated("it ends too early")


class StrictBody:
    """Receives and checks a body when a route asks for it, and not before.

    So an unknown route and another tenant's session cost no body. A route gets the body in one
    piece; other than JSON is refused.
    """

    def __init__(self, app: ASGIApp, settings: GatewaySettings, parser: BodyParser) -> None:
        self._app = app
        self._settings = settings
        self._parser = parser
        self._buffer = BodyBuffer(settings.max_body_buffer_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that checks the body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._buffer.hold() as body:
            received = disconnected = False

            async def receive_checked() -> Message:
                nonlocal received, disconnected
                if received:
                    return await receive()
                received = True
                try:
                    content = await self._receive(body, scope, receive)
                except ClientDisconnect:
                    disconnected = True
                    raise
                return {"type": "http.request", "body": content, "more_body": False}

            async def send_if_connected(message: Message) -> None:
                if not disconnected:  # the framework answers a failed read with status 400
                    await send(message)

            await self._app(scope, receive_checked, send_if_connected)

    async def _receive(self, body: Body, scope: Scope, receive: Receive) -> bytes:
        headers = Headers(scope=scope)
        if _get_content_length(headers) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        encoding = headers.get("content-encoding", "")
        inflater = find_inflater(encoding)
        if inflater is None:
            raise _unknown_encoding(encoding)
        await body.receive(receive, self._settings, inflater)
        try:
            return await self._parser.parse(scope, headers.get(TENANT_HEADER, ""), body.take())
        except QueueFull as error:
            raise _no_thread() from error
        except ValueError as error:
            message = f"the body is not JSON in UTF-8: {error}"
            raise BodyRefused(ErrorCode.MALFORMED_JSON, message) from error


def _too_large(limit: int) -> BodyRefused:
    detail = f"the body exceeds the limit of {limit} bytes"
    return BodyRefused(ErrorCode.BODY_TOO_LARGE, detail, {"Connection": "close"}, limit=limit)


def _too_many_values(limit: int) -> BodyRefused:
    detail = f"the body has more than {limit} values: commas and brackets, also within texts"
    return BodyRefused(ErrorCode.BODY_TOO_LARGE, detail, {"Connection": "close"}, limit=limit)


def _no_thread() -> BodyRefused:
    detail = "too many large bodies of this tenant at once; try again later"
    return BodyRefused(ErrorCode.OVERLOADED, detail, _RETRY_AFTER)


def _unknown_encoding(encoding: str) -> BodyRefused:
    accepted = ", ".join(ACCEPTED)
    detail = f"content-encoding {encoding[:40]!r} is not supported; expected one of {accepted}"
    headers = {"Connection": "close", "Accept-Encoding": accepted}
    return BodyRefused(ErrorCode.UNSUPPORTED_ENCODING, detail, headers)


def _not_inflated(reason: str) -> BodyRefused:
    detail = f"the body is not compressed as its content-encoding says: {reason}"
    return BodyRefused(ErrorCode.MALFORMED_JSON, detail, {"Connection": "close"})


def _too_slow(seconds: float) -> BodyRefused:
    detail = f"the body did not arrive within {seconds:g} seconds"
    return BodyRefused(ErrorCode.BODY_TIMEOUT, detail, {"Connection": "close"})


def _no_memory() -> BodyRefused:
    detail = "too many large bodies at once, and this one had taken longest; try again later"
    return BodyRefused(ErrorCode.OVERLOADED, detail, {"Connection": "close", **_RETRY_AFTER})


def _get_content_length(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else 0
