"""Routes of OpenAI's Responses API."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gateway.answers import require_model, respond
from gateway.idempotency import Key, get_idempotency_key
from gateway.openai.pages import After, Limit, Order, build_page
from gateway.openai.responses.answering import Answering
from gateway.openai.responses.input_items import read_input_items
from gateway.openai.responses.schemas import ResponseBody
from gateway.settings import GatewaySettings
from gateway.tenants import Tenant
from kvrecall.domain.errors import InvalidRequest
from services.service import SessionService

_STREAM = {
    "description": "The response, or the stream of its events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_response_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the routes of responses."""
    _add_create(router, service, settings)
    _add_stored(router, service)


def _add_create(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    @router.post("/responses", responses={200: _STREAM}, tags=["openai"])
    async def create_response(
        request: Request, body: ResponseBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Answer the input, after what a response or a conversation that it names holds.

        The headers `kvrecall-session`, `kvrecall-match` (continued, forked, built, repeated) and
        `kvrecall-turn` tell which session has it, and how it was found.
        """
        require_model(body.model, service, settings)
        body.require_honoured()
        answering = Answering(service, tenant, body)
        return await respond(
            request,
            answering.start(get_idempotency_key(request, key, body)),
            answering.build,
            answering.encode if body.stream else None,
            settings,
        )

    @router.post("/responses/input_tokens", tags=["openai"])
    async def count_input_tokens(body: ResponseBody, tenant: Tenant = "") -> dict[str, Any]:
        """Count the tokens of a conversation with its tools, up to where the answer begins."""
        require_model(body.model, service, settings)
        body.require_honoured()
        tokens = await Answering(service, tenant, body).count()
        return {"object": "response.input_tokens", "input_tokens": tokens}


def _add_stored(router: APIRouter, service: SessionService) -> None:
    @router.get("/responses/{response}", tags=["openai"])
    async def get_response(
        response: str,
        stream: Annotated[bool, Query(description="Only of background responses.")] = False,
        tenant: Tenant = "",
    ) -> dict[str, Any]:
        """Get a stored response."""
        found = await service.responses.get(response, tenant)
        if stream:
            message = "only a background response can be streamed again"
            raise InvalidRequest("stream", message, openai_code="unsupported_parameter")
        body: dict[str, Any] = json.loads(found.body)
        return body

    @router.delete("/responses/{response}", tags=["openai"])
    async def delete_response(response: str, tenant: Tenant = "") -> dict[str, Any]:
        """Delete a stored response; those that go on from it stay."""
        await service.responses.delete(response, tenant)
        return {"id": response, "object": "response", "deleted": True}

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

    @router.post("/responses/{response}/cancel", tags=["openai"])
    async def cancel_response(response: str, tenant: Tenant = "") -> dict[str, Any]:
        """Cancel a background response: there are none, so an existing one is refused."""
        await service.responses.get(response, tenant)
        raise InvalidRequest("response_id", "Cannot cancel a synchronous response.")
