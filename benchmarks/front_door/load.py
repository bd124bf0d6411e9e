"""Load on an HTTP server: requests over kept connections, and slow, broken and greedy clients."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_SECONDS_BETWEEN_BYTES = 1.0


class Requester(asyncio.Protocol):
    """Sends one request again and again over one connection, each after the last one's response.

    `latencies` are seconds per response. `ended` fails for a response that is not 200.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._expected = 0
        self._sent_at = 0.0
        self._stopping = False
        self._transport: asyncio.Transport | None = None
        self.latencies: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Collect a response, then send the next request."""
        self._received += data
        if not self._expected and not self._read_head():
            return
        if len(self._received) < self._expected:
            return
        self.latencies.append(time.perf_counter() - self._sent_at)
        self._received.clear()
        self._expected = 0
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        """End, with an error unless the connection was stopped."""
        if not self.ended.done():
            if self._stopping:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(AssertionError(f"the connection was lost: {error}"))

    def stop(self) -> None:
        """Close the connection."""
        self._stopping = True
        if self._transport is not None:
            self._transport.abort()

    def _read_head(self) -> bool:
        """Learn the response's size; False while its head is not complete."""
        try:
            self._expected = find_end(self._received) or 0
        except AssertionError as error:
            self.ended.set_exception(error)
        return self._expected > 0

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


async def request_for(base: str, paths: Sequence[str], seconds: float) -> tuple[float, list[float]]:
    """GET each path over a connection of its own, again and again for some seconds.

    Returns requests per second, and the seconds of each request.
    """
    address = urlsplit(base)
    requesters = [
        Requester(f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
        for path in paths
    ]
    started = time.perf_counter()
    for requester in requesters:
        await _connect(base, requester)
    ends = [requester.ended for requester in requesters]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    passed = time.perf_counter() - started
    for requester in requesters:
        requester.stop()
    await asyncio.gather(*ends)
    latencies = [each for requester in requesters for each in requester.latencies]
    return len(latencies) / passed, latencies


async def _connect(base: str, requester: Requester) -> None:
    host, port = _address(base)
    await asyncio.get_running_loop().create_connection(lambda: requester, host, port)


def _address(base: str) -> tuple[str, int]:
    parts = urlsplit(base)
    assert parts.hostname is not None, "a server's address has a host"
    assert parts.port is not None, "and a port"
    return parts.hostname, parts.port


class Caller:
    """Sends requests one after the other over one connection, and waits for each response.

    A plain socket: what a client's library takes is not the server's.
    """

    def __init__(self, base: str) -> None:
        self._host, self._port = _address(base)
        self._socket = socket.create_connection((self._host, self._port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def post(self, path: str, body: bytes) -> tuple[float, bytes]:
        """Send a JSON body; return the seconds until the last byte of the response, and its body."""
        lines = (
            f"POST {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        )
        request = "\r\n".join((*lines, "", "")).encode() + body
        started = time.perf_counter()
        self._socket.sendall(request)
        received = bytearray()
        expected = None
        while expected is None or len(received) < expected:
            data = self._socket.recv(1 << 16)
            assert data, f"the connection was closed after {bytes(received)!r}"
            received += data
            if expected is None:
                expected = find_end(received)
        return time.perf_counter() - started, bytes(received).partition(_END_OF_HEAD)[2]


def find_end(received: bytearray) -> int | None:
    """Return where a response ends, None while its head is not complete. Raises AssertionError.

    The response has status 200 and tells its length.
    """
    end = received.find(_END_OF_HEAD)
    if end < 0:
        return None
    head = bytes(received[:end]).lower()
    assert head.startswith(b"http/1.1 200"), bytes(received).decode()
    length = head.index(_LENGTH) + len(_LENGTH)
    return end + len(_END_OF_HEAD) + int(head[length:].partition(b"\r\n")[0])


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Misbehaviour = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


async def send_body_slowly(writer: asyncio.StreamWriter) -> None:
    """Announce a body of 1 MiB, then send a byte a second."""
    writer.write(_post_head(1 << 20))
    await _trickle(writer, b" ")


async def send_head_slowly(writer: asyncio.StreamWriter) -> None:
    """Send a head that never ends, a byte a second."""
    writer.write(b"GET /v1/sessions HTTP/1.1\r\nX-Slow: ")
    await _trickle(writer, b"x")


async def stay_idle(writer: asyncio.StreamWriter) -> None:
    """Send nothing."""
    await asyncio.Event().wait()


async def break_off(writer: asyncio.StreamWriter) -> None:
    """Reset the connection in the middle of a body."""
    writer.write(_post_head(1000) + b'{"budget": ')
    await asyncio.sleep(_SECONDS_BETWEEN_BYTES)
    writer.transport.abort()


async def send_almost_all(writer: asyncio.StreamWriter) -> None:
    """Send a body of 4 MiB but for its last bytes, at once."""
    size = 4 << 20
    writer.write(_post_head(size) + b" " * (size - 10))
    await asyncio.Event().wait()


SLOW_OR_BROKEN: Sequence[Misbehaviour] = (
    send_body_slowly,
    send_head_slowly,
    stay_idle,
    break_off,
)


@asynccontextmanager
async def misbehaving(base: str, count: int, kinds: Sequence[Misbehaviour]) -> AsyncIterator[None]:
    """Keep `count` bad connections open, of each kind in turn; one that is cut is opened again."""
    clients = [
        asyncio.create_task(_misbehave(base, kinds[number % len(kinds)])) for number in range(count)
    ]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)


async def _misbehave(base: str, kind: Misbehaviour) -> None:
    host, port = _address(base)
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await _until_cut(reader, kind(writer))
            finally:
                writer.transport.abort()
        await asyncio.sleep(_SECONDS_BETWEEN_BYTES)


async def _until_cut(reader: asyncio.StreamReader, kind: Coroutine[Any, Any, None]) -> None:
    """Misbehave until the server ends the connection."""
    tasks = {asyncio.create_task(kind), asyncio.create_task(reader.read())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _trickle(writer: asyncio.StreamWriter, byte: bytes) -> None:
    while True:
        writer.write(byte)
        await writer.drain()
        await asyncio.sleep(_SECONDS_BETWEEN_BYTES)


def _post_head(length: int) -> bytes:
    lines = ("POST /v1/sessions HTTP/1.1", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()
