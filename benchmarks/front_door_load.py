"""Load on an HTTP server: requests per second over kept connections, and slow or broken ones."""

import asyncio
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"


class Requester(asyncio.Protocol):
    """Sends one request again and again over one connection, each after the last one's response.

    `latencies` are seconds per response. Raises AssertionError in the loop for a response that is
    not 200.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._received = bytearray()
        self._expected = 0
        self._sent_at = 0.0
        self._stopping = False
        self._transport: asyncio.Transport | None = None
        self.latencies: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Collect a response, then send the next request."""
        self._received += data
        if not self._expected:
            end = self._received.find(_END_OF_HEAD)
            if end < 0:
                return
            head = bytes(self._received[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                self.ended.set_exception(AssertionError(bytes(self._received).decode()))
                return
            length = head.index(_LENGTH) + len(_LENGTH)
            digits = head[length:].partition(b"\r\n")[0]
            self._expected = end + len(_END_OF_HEAD) + int(digits)
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

    def _send(self) -> None:
        assert self._transport is not None
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)


async def request_for(url: str, connections: int, seconds: float) -> tuple[float, list[float]]:
    """GET `url` over some connections for some seconds.

    Returns requests per second, and the seconds of each request.
    """
    parts = urlsplit(url)
    request = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    requesters: Sequence[Requester] = [Requester(request) for _ in range(connections)]
    started = time.perf_counter()
    for requester in requesters:
        await loop.create_connection(lambda each=requester: each, parts.hostname, parts.port)
    ends = [requester.ended for requester in requesters]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    passed = time.perf_counter() - started
    for requester in requesters:
        requester.stop()
    await asyncio.gather(*ends)
    latencies = [each for requester in requesters for each in requester.latencies]
    return len(latencies) / passed, latencies
