"""Settings of the HTTP server, and its limits on connections and on slow clients."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.errors import PROBLEM_JSON, build_problem
from gateway.settings import GatewaySettings
from kvrecall.domain.codes import ErrorCode


def server_options(settings: GatewaySettings) -> dict[str, Any]:
    """Build the options of `uvicorn.Config` that limit what clients may occupy."""
    return {
        "http": build_protocol(settings),
        # A peer is the address of its connection: proxies are trusted by that, not by headers.
        "proxy_headers": False,
        "timeout_keep_alive": settings.keepalive_seconds,
        "h11_max_incomplete_event_size": settings.max_header_bytes,
    }


def build_protocol(settings: GatewaySettings) -> type[asyncio.Protocol]:
    """Build the class of a connection with these limits: uvicorn makes its objects itself."""
    members = {"limits": settings, "refusal": _build_refusal(settings)}
    return type("Protocol", (LimitedProtocol,), members)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with the limits that uvicorn has no setting for.

    - A connection over `max_connections` is answered with `refusal` and closed at once.
    - The head of a request must arrive within `header_seconds`; the first one's time begins with
      the connection.
    - A response that the client leaves unread for `send_seconds` ends the connection.
    - A request whose body was not read to its end, because it was refused, ends the connection.
    """

    limits: GatewaySettings
    refusal: bytes
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request, unless there are too many connections."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self.connections) > self.limits.max_connections:
            self.transport.write(self.refusal)
            self.transport.close()
        else:
            self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        _stop(self._head_timer)
        _stop(self._send_timer)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Handle bytes; those of an unfinished head run against its time limit."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            _stop(self._head_timer)
            self._head_timer = None

    def on_response_complete(self) -> None:
        """End a connection whose request is not read to its end, else wait for the next."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.close()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        _stop(self._send_timer)
        super().resume_writing()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.limits.header_seconds, self.transport.abort
            )


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _build_refusal(settings: GatewaySettings) -> bytes:
    """Build the response to a connection too many."""
    detail = f"there are {settings.max_connections} connections, which is the limit"
    body = json.dumps(build_problem(ErrorCode.OVERLOADED, detail)).encode()
    head = (
        "HTTP/1.1 429 Too Many Requests",
        f"Content-Type: {PROBLEM_JSON}",
        f"Content-Length: {len(body)}",
        "Retry-After: 1",
        "Connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
