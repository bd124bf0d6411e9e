"""Sends HTTP requests of a tenant as the bytes that they are, and leaves where they say."""

import socket
import time
from contextlib import suppress
from urllib.parse import urlsplit

import httpx

from benchmarks.fuzz.replies import SECONDS
from benchmarks.fuzz.requests import Cut, Reply, Request
from benchmarks.fuzz.world import World

# Bytes of a reply after which a client leaves.
_LEFT_AFTER = 64


class HttpSender:
    """One connection pool with a tenant's key. For one thread.

    It replaces references by ids of `world`, which learns those of the replies.
    """

    def __init__(self, url: str, key: str, world: World) -> None:
        self._world = world
        self._url = url
        self._authorization = ("authorization", f"Bearer {key}")
        self._client = httpx.Client(base_url=url, timeout=SECONDS + 30, follow_redirects=False)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def send(self, request: Request) -> Reply:
        """Send a request; an error of the connection is a reply with `error`."""
        start = time.monotonic()
        request = self._world.resolve_request(request)
        try:
            if request.cut is Cut.BODY:
                return self._leave_body(request)
            reply = self._send(request, start)
            self._world.learn(reply.body)
            return reply
        except (
            httpx.InvalidURL,
            UnicodeError,
            httpx.LocalProtocolError,
            httpx.UnsupportedProtocol,
        ):
            return Reply("not sent")  # the client library refuses to write such a request
        except httpx.HTTPError as error:
            return Reply("none", error=repr(error), seconds=time.monotonic() - start)

    def _send(self, request: Request, start: float) -> Reply:
        headers = [*request.headers, self._authorization]
        with self._client.stream(
            request.method, request.path, headers=headers, content=request.body
        ) as response:
            status = str(response.status_code)
            content_type = response.headers.get("content-type", "")
            body = b""
            for chunk in response.iter_bytes():
                body += chunk
                if request.cut is Cut.REPLY and len(body) > _LEFT_AFTER:
                    return Reply(status, content_type, body, error="left")
        return Reply(status, content_type, body, seconds=time.monotonic() - start)

    def _leave_body(self, request: Request) -> Reply:
        """Announce a body, send half of it and go."""
        parts = urlsplit(self._url)
        lines = [f"{request.method} {request.path} HTTP/1.1", f"host: {parts.netloc}"]
        for name, value in (*request.headers, self._authorization):
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {len(request.body)}\r\n\r\n")
        head = "\r\n".join(lines).encode("latin-1")
        with suppress(OSError), socket.create_connection((parts.hostname, parts.port), 10) as sent:
            sent.sendall(head + request.body[: len(request.body) // 2])
        return Reply("left", error="left")
