"""REST: sessions, their turns, the events of their tool calls, their memory."""

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from gateway.errors import problems
from gateway.idempotency import Key, key_of
from gateway.middleware import CLIENT_GONE
from gateway.rest.routes.forks import add_forks
from gateway.rest.schemas.repairs import RepairsView
from gateway.rest.schemas.requests import CreateSessionBody, EventBody, MoveBody, TurnBody
from gateway.rest.schemas.views import (
    EpisodesView,
    EventView,
    MemoryView,
    SessionPageView,
    SessionView,
    TurnView,
)
from gateway.rest.schemas.workers import MethodsView, WorkerLoadView, WorkersView, WorkerView
from gateway.settings import GatewaySettings
from gateway.sse import ClientGone, EventStream, outcome_of, while_connected
from gateway.tenants import Tenant, own_session
from services.catalog.records import REPAIRS_RETAINED
from services.service import SessionService
from services.turn_stream import TurnStream

STREAM_CONTENT = {
    "description": "The turn, or its events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def sessions_router(service: SessionService, settings: GatewaySettings) -> APIRouter:
    """The routes under /v1."""
    tenant = [Depends(own_session(service))]
    router = APIRouter(
        prefix="/v1", responses=problems(400, 413, 422, 500, 503), dependencies=tenant
    )
    _add_sessions(router, service)
    add_forks(router, service)
    _add_turns(router, service, settings)
    _add_events(router, service)
    _add_worker(router, service)
    return router


def _add_sessions(router: APIRouter, service: SessionService) -> None:
    @router.post("/sessions", status_code=201, responses=problems(409, 429), tags=["sessions"])
    async def create_session(
        request: Request, body: CreateSessionBody, key: Key = None, tenant: Tenant = ""
    ) -> SessionView:
        """Open a session; the server chooses its id."""
        session = await service.create(
            replace(body.value(), tenant=tenant), key_of(request, key, body)
        )
        return SessionView.of(session, session.committed_state, service.info.model)

    @router.get("/sessions", tags=["sessions"])
    async def list_sessions(
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        cursor: Annotated[str | None, Query(max_length=512)] = None,
        tenant: Tenant = "",
    ) -> SessionPageView:
        """List sessions, newest first."""
        page, states = await service.page(limit, cursor, tenant)
        pairs = zip(page.sessions, states, strict=True)
        views = [SessionView.of(session, state, service.info.model) for session, state in pairs]
        return SessionPageView(sessions=views, next_cursor=page.next_cursor)

    @router.get("/sessions/{session}", responses=problems(404), tags=["sessions"])
    async def get_session(session: str) -> SessionView:
        """A session: its settings, and where it stands."""
        found, state = await service.get(session)
        return SessionView.of(found, state, service.info.model)

    @router.delete(
        "/sessions/{session}", status_code=204, responses=problems(404, 409, 429), tags=["sessions"]
    )
    async def delete_session(request: Request, session: str, key: Key = None) -> Response:
        """Forget a session and everything said in it."""
        await service.delete(session, key_of(request, key))
        return Response(status_code=204)

    @router.post("/sessions/{session}/move", responses=problems(404, 409, 429), tags=["sessions"])
    async def move_session(session: str, body: MoveBody = MoveBody()) -> SessionView:
        """Have a session go on in another worker, as it was committed last; nothing of it is computed again."""
        moved = await service.move(session, body.worker)
        return SessionView.of(moved, moved.committed_state, service.info.model)

    @router.get("/sessions/{session}/memory", responses=problems(404), tags=["sessions"])
    async def session_memory(session: str) -> MemoryView:
        """What a session holds: rows per layer, bytes per tier."""
        return MemoryView.of(session, await service.memory(session))

    @router.get("/sessions/{session}/repairs", responses=problems(404), tags=["sessions"])
    async def session_repairs(
        session: str, limit: Annotated[int, Query(ge=1, le=REPAIRS_RETAINED)] = 10
    ) -> RepairsView:
        """A session's last repairs, newest first: what they looked for, and the text around what they brought back."""
        return RepairsView.of(session, await service.repairs(session, limit))

    @router.get("/sessions/{session}/episodes", responses=problems(404), tags=["sessions"])
    async def session_episodes(session: str) -> EpisodesView:
        """A session's episodes: size, medoid, how often a turn was about each."""
        return EpisodesView.of(*await service.episodes(session))


def _add_turns(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    @router.post(
        "/sessions/{session}/turns",
        response_model=TurnView,
        responses={200: STREAM_CONTENT, **problems(404, 409, 429)},
        tags=["turns"],
    )
    async def send_turn(request: Request, session: str, body: TurnBody, key: Key = None) -> Any:
        """Say what is new, and have it answered or only remembered."""
        stream = service.turn(session, body.value(service.limits), key_of(request, key, body))
        try:
            if body.stream:
                return await _started(request, stream, settings)
            return TurnView.of(await while_connected(request, outcome_of(stream)))
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        finally:
            if not body.stream:
                await stream.aclose()


async def _started(request: Request, stream: TurnStream, settings: GatewaySettings) -> EventStream:
    """Wait until the turn is accepted, so that a refusal is an answer with its own status and no stream."""
    try:
        await while_connected(request, stream.__anext__())
    except BaseException:
        await stream.aclose()
        raise
    return EventStream(stream, settings.heartbeat_seconds)


def _add_events(router: APIRouter, service: SessionService) -> None:
    @router.post("/sessions/{session}/events", responses=problems(404, 409, 429), tags=["events"])
    async def send_event(
        request: Request, session: str, body: EventBody, key: Key = None
    ) -> EventView:
        """Report on a tool call: started, a piece of its output, its result, its failure."""
        return EventView.of(await service.event(session, body.value(), key_of(request, key, body)))


def _add_worker(router: APIRouter, service: SessionService) -> None:
    @router.get("/methods", tags=["worker"])
    async def list_methods() -> MethodsView:
        """The eviction methods a session may be created with, and how it may be repaired."""
        return MethodsView.of(service.info)

    @router.get("/workers", tags=["worker"])
    async def list_workers() -> WorkersView:
        """The workers that can be reached, with what each has to do."""
        records = sorted(await service.workers(), key=lambda record: record.name)
        return WorkersView(workers=[WorkerLoadView.model_validate(record) for record in records])

    @router.get("/worker", tags=["worker"])
    async def get_worker() -> WorkerView:
        """The model that is served, and the limits that follow from it."""
        return WorkerView.model_validate(service.info)
