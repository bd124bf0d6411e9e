"""Routes of OpenAI's API; those of chat completions and models are here."""

import time
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gateway.answers import require_model, respond
from gateway.idempotency import Key, get_idempotency_key
from gateway.openai.chunks import CompletionChunks, Head, build_completion
from gateway.openai.conversations.routes import add_conversation_routes
from gateway.openai.responses.routes import add_response_routes
from gateway.openai.schemas import ChatCompletionBody
from gateway.settings import GatewaySettings
from gateway.tenants import Tenant
from services.conversations.matching import Conversation
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
        head = Head(body.model, service.info.fingerprint[:16])
        options = body.stream_options
        include_usage = options is not None and options.include_usage
        return await respond(
            request,
            service.conversations.turn(conversation),
            partial(build_completion, head),
            (lambda found: CompletionChunks(head, found, include_usage)) if body.stream else None,
            settings,
        )


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
        require_model(model, service, settings)
        return describe(model)
