"""Routes of sessions: create, list, get, delete, fork, move; memory, repairs and episodes."""

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from gateway.http.errors import problem_responses
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.tenants import Tenant
from gateway.rest.conditional import NOT_MODIFIED, respond_if_changed
from gateway.rest.rendered import RenderedSessions
from gateway.rest.schemas.episodes import to_episodes
from gateway.rest.schemas.memory import to_memory
from gateway.rest.schemas.repairs import to_repairs
from gateway.rest.schemas.sessions import (
    CreateSessionBody,
    ForkBody,
    MoveBody,
    to_session,
    to_session_page,
)
from kvrecall import client
from services.catalog.records import REPAIRS_RETAINED
from services.reading.search import Order, SessionQuery, State
from services.service import SessionService


def add_session_routes(router: APIRouter, service: SessionService) -> None:
    """Add the routes of sessions but those of `add_session_reads`."""
    _add_writes(router, service)
    _add_fork_and_move(router, service)
    _add_reports(router, service)


def add_session_reads(router: APIRouter, service: SessionService) -> None:
    """Add the routes that read sessions, which check the tenant themselves."""
    rendered = RenderedSessions()

    @router.get(
        "/sessions/{session}",
        response_model=client.Session,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def get_session(request: Request, session: str, tenant: Tenant = "") -> Response:
        """Get a session: its settings, its state, the number of turns and tokens."""
        committed, state = await service.get(session, tenant)
        body = rendered.render(committed, state, service.info.model)
        return respond_if_changed(request, body)

    @router.get(
        "/sessions",
        response_model=client.SessionPage,
        responses={**NOT_MODIFIED},
        tags=["sessions"],
    )
    async def list_sessions(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=200, description="Sessions in one page.")] = 50,
        cursor: Annotated[
            str | None, Query(max_length=512, description="`next_cursor` of the previous page.")
        ] = None,
        state: Annotated[
            State | None, Query(description="State of the sessions, as far as this gateway knows.")
        ] = None,
        method: Annotated[str, Query(max_length=256, description="Eviction method.")] = "",
        worker: Annotated[
            str, Query(max_length=256, description="Worker that has the session's rows.")
        ] = "",
        q: Annotated[
            str,
            Query(
                max_length=200,
                description="Text in the id or in the metadata, in any case of letters.",
            ),
        ] = "",
        order: Annotated[
            Order, Query(description="Newest first, last turn first, or longest first.")
        ] = "created",
        tenant: Tenant = "",
    ) -> Response:
        """List sessions, newest first unless another order is asked for.

        Filters, and orders other than by creation, are applied to 2,000 sessions at most.
        """
        query = SessionQuery(limit, cursor, state or "", method, worker, q, order)
        found = await service.reading.search(query, tenant)
        page = to_session_page(found, service.info.model)
        return respond_if_changed(request, page)


def _add_writes(router: APIRouter, service: SessionService) -> None:
    @router.post(
        "/sessions", status_code=201, responses=problem_responses(409, 429), tags=["sessions"]
    )
    async def create_session(
        request: Request, body: CreateSessionBody, key: Key = None, tenant: Tenant = ""
    ) -> client.Session:
        """Create a session; the service assigns its id."""
        session = await service.create(
            replace(body.to_domain(), tenant=tenant), get_idempotency_key(request, key, body)
        )
        return to_session(session, session.committed_state, service.info.model)

    @router.delete(
        "/sessions/{session}",
        status_code=204,
        responses=problem_responses(404, 409, 429),
        tags=["sessions"],
    )
    async def delete_session(
        request: Request, session: str, key: Key = None, tenant: Tenant = ""
    ) -> Response:
        """Delete a session with its conversation and its stored rows."""
        await service.delete(session, get_idempotency_key(request, key), tenant)
        return Response(status_code=204)


def _add_fork_and_move(router: APIRouter, service: SessionService) -> None:
    @router.post(
        "/sessions/{session}/fork",
        status_code=201,
        responses=problem_responses(404, 409, 429),
        tags=["sessions"],
    )
    async def fork_session(
        request: Request,
        session: str,
        body: ForkBody = ForkBody(),
        key: Key = None,
        tenant: Tenant = "",
    ) -> client.Session:
        """Create a session that continues this one from the end of a turn; both stay independent.

        The fork has the same settings, seed included: the same messages get the same replies. It
        shares the stored rows; a fork at the last turn computes nothing.
        """
        fork = await service.fork(
            session, body.to_domain(), get_idempotency_key(request, key, body), tenant
        )
        return to_session(fork, fork.committed_state, service.info.model)

    @router.post(
        "/sessions/{session}/move", responses=problem_responses(404, 409, 429), tags=["sessions"]
    )
    async def move_session(
        session: str, body: MoveBody = MoveBody(), tenant: Tenant = ""
    ) -> client.Session:
        """Move a session to another worker; its rows are loaded there, nothing is recomputed."""
        moved = await service.move(session, body.worker, tenant)
        return to_session(moved, moved.committed_state, service.info.model)


def _add_reports(router: APIRouter, service: SessionService) -> None:
    @router.get(
        "/sessions/{session}/memory",
        response_model=client.Memory,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def session_memory(request: Request, session: str, tenant: Tenant = "") -> Response:
        """Get the memory of a session: rows per layer, bytes per tier."""
        memory = await service.memory(session, tenant)
        return respond_if_changed(request, to_memory(session, memory))

    @router.get(
        "/sessions/{session}/repairs",
        response_model=client.Repairs,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def session_repairs(
        request: Request,
        session: str,
        limit: Annotated[
            int, Query(ge=1, le=REPAIRS_RETAINED, description="Repairs to return.")
        ] = 10,
        tenant: Tenant = "",
    ) -> Response:
        """List the last repairs of a session, newest first: signals and promoted passages."""
        repairs = await service.repairs(session, limit, tenant)
        return respond_if_changed(request, to_repairs(session, repairs))

    @router.get(
        "/sessions/{session}/episodes",
        response_model=client.Episodes,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def session_episodes(request: Request, session: str, tenant: Tenant = "") -> Response:
        """List the episodes of a session: size, medoid, number of matched turns."""
        episodes = to_episodes(*await service.episodes(session, tenant))
        return respond_if_changed(request, episodes)
