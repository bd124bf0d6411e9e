"""Routes of OpenAI's API; those of chat completions are here."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.idempotency import Key, get_idempotency_key
from gateway.middleware import CLIENT_CLOSED_REQUEST
from gateway.openai.chunks import CompletionChunks, Head, build_completion
from gateway.openai.conversations.routes import add_conversation_routes
from gateway.openai.headers import get_session_headers
from gateway.openai.models import add_model_routes, require_model
from gateway.openai.responses.routes import add_response_routes
from gateway.openai.schemas import ChatCompletionBody
from gateway.settings import GatewaySettings
from gateway.sse import ClientDisconnected, EventStream, read_answer, run_while_connected
from gateway.tenants import Tenant
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
    add_model_routes(router, service, settings)
    add_response_routes(router, service, settings)
    add_conversation_routes(router, service)

    @router.post("/chat/completions", responses={200: _STREAM}, tags=["openai"])
    async def create_chat_completion(
        request: Request, body: ChatCompletionBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Answer a conversation, in the session that holds it already.

        The headers `kvrecall-session`, `kvrecall-match` (continued, forked, built, repeated) and
        `kvrecall-turn` tell which, and how it was found.
        """
        require_model(body.model, service, settings)
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
            return await _answer(request, found, head, body.logprobs is True)
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _answer(
    request: Request, found: Continuation, head: Head, with_logprobs: bool
) -> Response:
    try:
        outcome, logprobs = await run_while_connected(request, read_answer(found.stream))
    finally:
        await found.stream.aclose()
    headers = get_session_headers(found)
    completion = build_completion(head, outcome, found, logprobs if with_logprobs else None)
    return JSONResponse(completion, headers=headers)


def _stream(
    found: Continuation, head: Head, body: ChatCompletionBody, settings: GatewaySettings
) -> EventStream:
    options = body.stream_options
    chunks = CompletionChunks(head, found, options is not None and options.include_usage)
    return EventStream(found.stream, settings.heartbeat_seconds, chunks, get_session_headers(found))
