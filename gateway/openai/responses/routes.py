"""Routes of OpenAI's Responses API."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from gateway.conversation.answers import read_answer, require_model, respond
from gateway.conversation.directives import read_directives, report_changes
from gateway.http.errors import find_overflow, to_problem
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.middleware import CLIENT_CLOSED_REQUEST
from gateway.http.settings import GatewaySettings
from gateway.http.sse import ClientDisconnected, EventStream, run_while_connected
from gateway.http.tenants import Tenant
from gateway.openai.pages import After, Limit, Order, build_page
from gateway.openai.responses.answering import Answering
from gateway.openai.responses.background import BackgroundResponses, Begun
from gateway.openai.responses.event_log import AsTheyAre
from gateway.openai.responses.items import read_input_items
from gateway.openai.responses.schemas import ResponseBody
from kvrecall.domain.errors import ServiceError
from services.service import SessionService

_STREAM = {
    "description": "The response, or the stream of its events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_response_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the routes of responses."""
    background = BackgroundResponses(service)
    _add_create(router, service, settings, background)
    _add_compact(router, service, settings)
    _add_stored(router, service, settings, background)
    _add_input(router, service)


def _add_create(
    router: APIRouter,
    service: SessionService,
    settings: GatewaySettings,
    background: BackgroundResponses,
) -> None:
    @router.post("/responses", responses={200: _STREAM}, tags=["openai"])
    async def create_response(
        request: Request, body: ResponseBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Answer the input, after what a response or a conversation that it names holds.

        The headers `kvrecall-session`, `kvrecall-match` (continued, forked, built, repeated) and
        `kvrecall-turn` tell which session has it, and how it was found. With `background` the
        answer is the response in progress, once its turn has been accepted.
        """
        require_model(body.model, service, settings)
        body = read_directives(request, body)
        body.require_honoured()
        answering = Answering(service, tenant, body)
        idempotency = get_idempotency_key(request, key, body)
        report = report_changes(service, body, answering.get_place)
        try:
            if body.background:
                started = background.start(answering, idempotency)
                encode = (lambda _: AsTheyAre()) if body.stream else None
                return await respond(request, started, _get_response, encode, settings, report)
            return await respond(
                request,
                answering.start(idempotency),
                partial(read_answer, answering.build),
                answering.encode if body.stream else None,
                settings,
                report,
            )
        except ServiceError as error:
            problem = to_problem(error)
            if not body.stream or find_overflow(problem) is None:
                raise
            # OpenAI says it within the stream, and Codex reads it there.
            return Response(answering.encode_refusal(problem), media_type="text/event-stream")

    @router.post("/responses/input_tokens", tags=["openai"])
    async def count_input_tokens(
        request: Request, body: ResponseBody, tenant: Tenant = ""
    ) -> dict[str, Any]:
        """Count the tokens of a conversation with its tools, up to where the answer begins."""
        require_model(body.model, service, settings)
        body = read_directives(request, body)
        body.require_honoured()
        tokens = await Answering(service, tenant, body).count()
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _add_compact(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    @router.post("/responses/compact", tags=["openai"])
    async def compact_conversation(
        request: Request, body: ResponseBody, tenant: Tenant = ""
    ) -> Any:
        """Let the model summarize a conversation, for one that goes on from the summary.

        The answer's `output` is what the next request has as its first items.
        """
        require_model(body.model, service, settings)
        body = read_directives(request, body)
        body.require_honoured()
        try:
            return await run_while_connected(request, Answering(service, tenant, body).compact())
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _get_response(begun: Begun) -> dict[str, Any]:
    return begun.response


def _add_stored(
    router: APIRouter,
    service: SessionService,
    settings: GatewaySettings,
    background: BackgroundResponses,
) -> None:
    @router.get("/responses/{response}", responses={200: _STREAM}, tags=["openai"])
    async def get_response(
        response: str,
        stream: Annotated[bool, Query(description="Only of background responses.")] = False,
        starting_after: Annotated[
            int | None,
            Query(ge=-1, lt=2**31, description="Number of the last event that is known."),
        ] = None,
        tenant: Tenant = "",
    ) -> Any:
        """Get a stored response, or the events of one in the background up to its end."""
        if not stream:
            return await background.read(response, tenant)
        events = await background.stream(response, tenant, starting_after)
        return EventStream(events, settings.heartbeat_seconds, AsTheyAre())

    @router.delete("/responses/{response}", tags=["openai"])
    async def delete_response(response: str, tenant: Tenant = "") -> dict[str, Any]:
        """Delete a stored response; those that go on from it stay."""
        await background.delete(response, tenant)
        return {"id": response, "object": "response", "deleted": True}

    @router.post("/responses/{response}/cancel", tags=["openai"])
    async def cancel_response(response: str, tenant: Tenant = "") -> dict[str, Any]:
        """Cancel a background response; one that has ended stays as it is."""
        return await background.cancel(response, tenant)


def _add_input(router: APIRouter, service: SessionService) -> None:
    @router.get("/responses/{response}/input_items", tags=["openai"])
    async def list_input_items(
        response: str,
        after: After = None,
        limit: Limit = 20,
        order: Order = "desc",
        tenant: Tenant = "",
    ) -> dict[str, Any]:
        """List the items that led to a response: its conversation, without its instructions."""
        found = await service.responses.get(response, tenant)
        items = await read_input_items(service, found, after, limit + 1, order == "desc")
        return build_page(items, limit)
