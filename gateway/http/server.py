"""Settings of the HTTP server, and its limits on connections and on slow clients."""

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http.errors import PROBLEM_JSON, build_problem
from gateway.http.gathering import GatheringTransport
from gateway.http.settings import GatewaySettings
from gateway.observation.spans import PROBES
from kvrecall.domain.codes import ErrorCode

# Connections beyond the limit that wait for a probe.
_MAX_PROBES = 32


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
    idle: dict[LimitedProtocol, None] = {}
    members = {"limits": settings, "refusal": _build_refusal(settings), "idle": idle}
    return type("Protocol", (LimitedProtocol,), members)


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with the limits that uvicorn has no setting for.

    - A connection over `max_connections` takes the place of the one that has sent no request for
      longest. Where all are within requests it is served probes alone, so that an orchestrator does not
      restart a gateway for being busy; beyond some more of these it is answered with `refusal`.
    - The head of a request must arrive within `header_seconds`; the first one's time begins with
      the connection.
    - A response that the client leaves unread for `send_seconds` ends the connection.
    - The body of a request that was refused before it was read is discarded, up to `max_body_bytes`
      within `keepalive_seconds`, so that the client reads why; then the connection ends.
    """

    limits: GatewaySettings
    refusal: bytes
    idle: "dict[LimitedProtocol, None]"  # of all connections, the longest idle one first
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _discard_timer: asyncio.TimerHandle | None = None
    _discarded = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request, unless there are too many connections."""
        gathering = GatheringTransport(transport)  # type: ignore[arg-type]
        self._flush = gathering.flush
        super().connection_made(gathering)
        over = len(self.connections) - self.limits.max_connections
        if over > 0 and not self._take_place():
            self.app = _serve_probes(self.app, self.limits)
            if over > _MAX_PROBES:
                self.transport.write(self.refusal)
                self.transport.close()
                return
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self.idle.pop(self, None)
        _stop(self._head_timer)
        _stop(self._send_timer)
        _stop(self._discard_timer)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """Handle bytes; those of an unfinished head run against its time limit."""
        if self.transport.is_closing():
            return
        refused = self.cycle
        super().data_received(data)
        if self._discard_timer is not None:
            ended = self.cycle is not refused or self.conn.their_state is not h11.SEND_BODY
            self._discard(len(data), ended)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            _stop(self._head_timer)
            self._head_timer = None
            self.idle.pop(self, None)

    def on_response_complete(self) -> None:
        """Wait for the next request, after the rest of this one if its body was not read."""
        self._flush()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            # Closed at once, the connection could take the answer with it: TCP drops what the
            # client has not read when data arrives for a closed socket.
            self._discarded = 0
            self._discard_timer = self.loop.call_later(
                self.limits.keepalive_seconds, self.transport.close
            )
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE:
            self.idle[self] = None

    def pause_writing(self) -> None:
        """Give the client some time to read."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self.limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client reads."""
        _stop(self._send_timer)
        super().resume_writing()

    def _discard(self, size: int, ended: bool) -> None:
        """Count bytes of a refused body until it has ended; too many end the connection."""
        self._discarded += size
        if ended:
            _stop(self._discard_timer)
            self._discard_timer = None
        elif self._discarded > self.limits.max_body_bytes:
            self.transport.close()

    def _take_place(self) -> bool:
        """Close the connection that is idle for longest; False if there is none."""
        longest = next(iter(self.idle), None)
        if longest is not None:
            del self.idle[longest]
            longest.transport.close()
        return longest is not None

    def _await_head(self) -> None:
        self.idle.setdefault(self)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(
                self.limits.header_seconds, self.transport.abort
            )


def _serve_probes(app: Any, settings: GatewaySettings) -> Any:
    """Wrap an application so that it serves probes alone."""
    body = _build_problem(settings)
    headers = [
        (b"content-type", PROBLEM_JSON.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in PROBES:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return serve


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _build_refusal(settings: GatewaySettings) -> bytes:
    """Build the response to a connection too many."""
    body = _build_problem(settings)
    head = (
        "HTTP/1.1 429 Too Many Requests",
        f"Content-Type: {PROBLEM_JSON}",
        f"Content-Length: {len(body)}",
        "Retry-After: 1",
        "Connection: close",
    )
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def _build_problem(settings: GatewaySettings) -> bytes:
    detail = f"there are {settings.max_connections} connections, which is the limit"
    return json.dumps(build_problem(ErrorCode.OVERLOADED, detail)).encode()
