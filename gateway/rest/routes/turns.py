"""Route of turns: append messages, generate a reply, in one response or as a stream."""

from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.http.errors import problem_responses
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.middleware import CLIENT_CLOSED_REQUEST
from gateway.http.settings import GatewaySettings
from gateway.http.sse import (
    ClientDisconnected,
    EventStream,
    read_outcome,
    run_while_connected,
)
from gateway.http.tenants import Tenant
from gateway.rest.schemas.turns import Turn, TurnBody, to_turn
from gateway.rest.session_events import SessionEvents
from kvrecall.domain.events import TurnStarted
from services.service import SessionService
from services.streams.turn import TurnProgress, TurnStream

STREAM_CONTENT = {
    "description": "The committed turn, or the stream of its events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_turn_routes(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    """Add the route of turns."""

    @router.post(
        "/sessions/{session}/turns",
        response_model=Turn,
        responses={200: STREAM_CONTENT, **problem_responses(404, 409, 429)},
        tags=["turns"],
    )
    async def send_turn(
        request: Request, session: str, body: TurnBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Append messages to the session; generate a reply unless `generate` is false."""
        stream = service.turn(
            session,
            body.to_domain(service.default_sampling),
            get_idempotency_key(request, key, body),
            tenant,
        )
        try:
            if body.stream:
                return await _start_stream(request, stream, settings)
            outcome = await run_while_connected(request, read_outcome(stream))
            return to_turn(outcome)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            if not body.stream:
                await stream.aclose()


async def _accept(stream: TurnStream) -> None:
    """Read a stream up to where the worker has taken the turn."""
    started = await anext(stream)
    if not (isinstance(started, TurnStarted) and started.replayed):
        await stream.wait_until_planned()


async def _start_stream(
    request: Request, stream: TurnStream, settings: GatewaySettings
) -> EventStream[TurnProgress]:
    """Wait for the turn to be accepted, so that a refusal has its own status and no stream."""
    try:
        await run_while_connected(request, _accept(stream))
    except BaseException:
        await stream.aclose()
        raise
    return EventStream(stream, settings.heartbeat_seconds, SessionEvents())
