"""Routes that read what a session holds: log, memory map, family, pauses. They open no session.

They pass their tenant on themselves: the service knows no other's sessions.
"""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from gateway.http.errors import problem_responses
from gateway.http.tenants import Tenant
from gateway.rest.conditional import NOT_MODIFIED, respond_unless_current
from gateway.rest.schemas.family import to_family
from gateway.rest.schemas.log import TurnLog, to_turn_log
from gateway.rest.schemas.memory_map import to_memory_map, to_memory_tokens
from gateway.rest.schemas.pauses import to_pauses
from kvrecall import client
from services.reading.reader import MAX_TOKENS
from services.reading.versions import get_version
from services.service import SessionService

MAX_COLUMNS = 2000
MAX_POSITION = 2**40

_Position = Query(ge=0, le=MAX_POSITION, description="First token; 0 is the session's first.")
_Stop = Query(
    ge=0, le=MAX_POSITION, description="Position after the last token; omitted: up to the end."
)


def add_reading_routes(router: APIRouter, service: SessionService) -> None:
    """Add the routes of a session's log, map, family and pauses."""
    _add_log(router, service)
    _add_maps(router, service)
    _add_relations(router, service)


def _add_log(router: APIRouter, service: SessionService) -> None:
    @router.get(
        "/sessions/{session}/turns",
        response_model=TurnLog,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def session_turns(
        request: Request,
        session: str,
        after: Annotated[
            int, Query(ge=0, lt=2**31, description="Number of the turn before the first one.")
        ] = 0,
        limit: Annotated[int, Query(ge=1, le=200, description="Turns to return.")] = 50,
        tenant: Tenant = "",
    ) -> Response:
        """List the committed turns of a session, oldest first: messages, tokens, times, memory."""
        found = await service.reading.get(session, tenant)

        async def build() -> TurnLog:
            records = await service.reading.turns(found, after, limit)
            return to_turn_log(found, records, limit)

        return await respond_unless_current(request, get_version(found), build)


def _add_maps(router: APIRouter, service: SessionService) -> None:
    @router.get(
        "/sessions/{session}/memory/map",
        response_model=client.MemoryMap,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def memory_map(
        request: Request,
        session: str,
        start: Annotated[int, _Position] = 0,
        stop: Annotated[int | None, _Stop] = None,
        columns: Annotated[
            int,
            Query(ge=1, le=MAX_COLUMNS, description="Cells of a layer; at most one a token."),
        ] = 512,
        head: Annotated[
            int | None, Query(ge=0, lt=2**31, description="One KV head; omitted: all together.")
        ] = None,
        tenant: Tenant = "",
    ) -> Response:
        """Map which tokens are active in each layer, as committed; works while a turn runs."""
        found = await service.reading.get(session, tenant)

        async def build() -> client.MemoryMap:
            return to_memory_map(await service.reading.map(found, start, stop, columns, head))

        return await respond_unless_current(request, get_version(found), build)

    @router.get(
        "/sessions/{session}/memory/tokens",
        response_model=client.MemoryTokens,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def memory_tokens(
        request: Request,
        session: str,
        start: Annotated[int, _Position] = 0,
        stop: Annotated[
            int | None,
            Query(
                ge=0,
                le=MAX_POSITION,
                description=f"Position after the last token; at most {MAX_TOKENS} after `start`, "
                "which is the default.",
            ),
        ] = None,
        tenant: Tenant = "",
    ) -> Response:
        """List tokens with the layers and heads that hold them and the reason, as committed."""
        found = await service.reading.get(session, tenant)

        async def build() -> client.MemoryTokens:
            return to_memory_tokens(await service.reading.tokens(found, start, stop))

        return await respond_unless_current(request, get_version(found), build)


def _add_relations(router: APIRouter, service: SessionService) -> None:
    @router.get("/sessions/{session}/family", responses=problem_responses(404), tags=["sessions"])
    async def session_family(session: str, tenant: Tenant = "") -> client.Family:
        """List the sessions that were forked from the same first one, with their shared tokens."""
        found = await service.reading.get(session, tenant)
        family = await service.reading.family(found)
        states = {
            each.id: service.get_state(each.session)
            for each in family.members
            if each.session is not None
        }
        return to_family(session, family, states)

    @router.get(
        "/sessions/{session}/pauses",
        response_model=client.Pauses,
        responses={**problem_responses(404), **NOT_MODIFIED},
        tags=["sessions"],
    )
    async def session_pauses(
        request: Request,
        session: str,
        limit: Annotated[int, Query(ge=1, le=100, description="Pauses to return.")] = 10,
        tenant: Tenant = "",
    ) -> Response:
        """List the last pauses, newest first: tool calls with their times, and repairs."""
        found = await service.reading.get(session, tenant)

        async def build() -> client.Pauses:
            return to_pauses(session, await service.reading.pauses(found, limit))

        return await respond_unless_current(request, get_version(found), build)
