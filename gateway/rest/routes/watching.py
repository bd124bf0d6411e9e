"""Routes for those who watch: streams of events, the overview of the last minutes, the version."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Response

from gateway.http.errors import problem_responses
from gateway.http.settings import GatewaySettings
from gateway.http.sse import EventStream
from gateway.http.tenants import Tenant
from gateway.rest.schemas.overview import to_overview
from kvrecall import client
from kvrecall.protocol import PROTOCOL_VERSION
from services.feed.feed import Subscription
from services.feed.notices import Notice
from services.service import SessionService

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events as they come; the first is a snapshot.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class NoticeEvents:
    """Notices as server-sent events."""

    def begin(self) -> bytes:
        """Encode nothing."""
        return b""

    def encode(self, progress: Notice) -> bytes:
        """Encode a notice."""
        return f"event: {progress.name}\ndata: {json.dumps(progress.to_json())}\n\n".encode()

    def fail(self, problem: Mapping[str, Any]) -> bytes:
        """Encode an error."""
        return f"event: error\ndata: {json.dumps(problem)}\n\n".encode()


def add_watching_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the streams of events and the overview."""

    def stream(subscription: Subscription) -> EventStream[Notice]:
        return EventStream(subscription, settings.heartbeat_seconds, NoticeEvents())

    @router.get(
        "/sessions/{session}/stream",
        response_class=Response,
        responses={**_STREAM, **problem_responses(404, 429)},
        tags=["sessions"],
    )
    async def stream_session(session: str, tenant: Tenant = "") -> Response:
        """Stream what happens in a session: a snapshot, then its turns, repairs, calls and states.

        Events have ids and numbers, no text. Nothing is replayed: a client that connects again
        begins with a new snapshot.
        """
        return stream(await service.watching.watch_session(session, tenant))

    @router.get(
        "/stream",
        response_class=Response,
        responses={**_STREAM, **problem_responses(429)},
        tags=["sessions"],
    )
    async def stream_sessions(tenant: Tenant = "") -> Response:
        """Stream what happens in all sessions: a snapshot of those that are active, then events."""
        return stream(await service.watching.watch_tenant(tenant))

    @router.get("/overview", tags=["sessions"])
    async def overview(tenant: Tenant = "") -> client.Overview:
        """Sum up the last 15 minutes of this gateway: turns, tokens, repairs, failures."""
        sessions, active = await service.watching.overview(tenant)
        steps = service.activity.get_steps(tenant)
        return to_overview(steps, service.activity.since, sessions, active)


def build_version(service: SessionService, settings: GatewaySettings) -> client.Version:
    """Build the version of the service and its model, which is not known before a worker joined."""
    info = service.known_info
    return client.Version(
        version=version("kvrecall"),
        revision=settings.revision,
        protocol=PROTOCOL_VERSION,
        model="" if info is None else info.model,
        fingerprint="" if info is None else info.fingerprint,
    )
