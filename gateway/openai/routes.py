"""Routes of OpenAI's API: chat completions and models."""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.idempotency import Key, get_idempotency_key
from gateway.middleware import CLIENT_CLOSED_REQUEST
from gateway.openai.chunks import CompletionChunks, Head, build_completion
from gateway.openai.schemas import ChatCompletionBody
from gateway.settings import GatewaySettings
from gateway.sse import ClientDisconnected, EventStream, read_outcome, run_while_connected
from gateway.tenants import Tenant
from kvrecall.domain.errors import UnknownModel
from services.conversations.matching import Continuation, Conversation
from services.service import SessionService

_STREAM = {
    "description": "The answer, or the stream of its chunks.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_openai_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the routes of OpenAI's API."""
    _add_models(router, service, settings)

    @router.post("/chat/completions", responses={200: _STREAM}, tags=["openai"])
    async def create_chat_completion(
        request: Request, body: ChatCompletionBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Answer a conversation, in the session that holds it already.

        The headers `kvrecall-session`, `kvrecall-match` (continued, forked, built, repeated) and
        `kvrecall-turn` tell which, and how it was found.
        """
        _require_model(body.model, service, settings)
        body.require_honoured()
        conversation = Conversation(
            body.messages_to_domain(),
            body.settings_to_domain(tenant),
            body.turn_to_domain(service.limits),
            get_idempotency_key(request, key, body),
        )
        try:
            found = await run_while_connected(request, service.conversations.turn(conversation))
            head = Head(body.model, service.info.fingerprint[:16])
            if body.stream:
                return _stream(found, head, body, settings)
            return await _answer(request, found, head)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)


def _add_models(router: APIRouter, service: SessionService, settings: GatewaySettings) -> None:
    started = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "kvrecall"}

    @router.get("/models", tags=["openai"])
    async def list_models() -> dict[str, Any]:
        """List the model that is served, and its aliases."""
        names = [service.info.model, *settings.model_aliases]
        return {"object": "list", "data": [describe(name) for name in names]}

    @router.get("/models/{model:path}", tags=["openai"])
    async def get_model(model: str) -> dict[str, Any]:
        """Get the model of this name."""
        _require_model(model, service, settings)
        return describe(model)


def _require_model(name: str, service: SessionService, settings: GatewaySettings) -> None:
    """Raise UnknownModel unless the service serves it."""
    if name != service.info.model and name not in settings.model_aliases:
        message = f"model {name!r} is not served here; {service.info.model!r} is"
        raise UnknownModel("model", message)


async def _answer(request: Request, found: Continuation, head: Head) -> Response:
    try:
        outcome = await run_while_connected(request, read_outcome(found.stream))
    finally:
        await found.stream.aclose()
    headers = {**_get_headers(found), "kvrecall-turn": str(outcome.turn)}
    return JSONResponse(build_completion(head, outcome, found), headers=headers)


def _stream(
    found: Continuation, head: Head, body: ChatCompletionBody, settings: GatewaySettings
) -> EventStream:
    options = body.stream_options
    chunks = CompletionChunks(head, found, options is not None and options.include_usage)
    return EventStream(found.stream, settings.heartbeat_seconds, chunks, _get_headers(found))


def _get_headers(found: Continuation) -> dict[str, str]:
    return {"kvrecall-session": found.session, "kvrecall-match": found.match}
