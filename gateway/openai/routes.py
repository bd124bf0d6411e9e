"""Routes of OpenAI's API; those of chat completions are here."""

from collections.abc import Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gateway.conversation.answers import Found, read_answer, require_model, respond
from gateway.conversation.directives import read_directives, report_changes
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.settings import GatewaySettings
from gateway.http.sse import get_outcome
from gateway.http.tenants import Tenant
from gateway.openai.chunks import CompletionChunks, Head, build_completion, build_completions
from gateway.openai.completions.routes import add_completion_routes
from gateway.openai.conversations import add_conversation_routes
from gateway.openai.models import add_model_routes
from gateway.openai.responses.routes import add_response_routes
from gateway.openai.schemas import ChatCompletionBody, StreamOptions
from kvrecall.domain.errors import InvalidRequest
from services.conversations.choices import Choices
from services.conversations.continuation import Conversation, Direction
from services.service import SessionService
from services.streams.turn import TurnProgress

_STREAM = {
    "description": "The answer, or the stream of its chunks.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def add_openai_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the routes of OpenAI's API."""
    add_model_routes(router, service, settings)
    add_completion_routes(router, service, settings)
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
        body = read_directives(request, body)
        body.require_honoured()
        conversation = Conversation(
            body.messages_to_domain(service.limits),
            body.settings_to_domain(tenant, service.info.template_variables),
            body.turn_to_domain(service.limits, service.default_sampling),
            get_idempotency_key(request, key, body),
        )
        head = Head(body.model, service.info.fingerprint[:16], body.call_form)
        options = body.stream_options or StreamOptions()
        direction = body.kvrecall.direction
        if (body.n or 1) > 1:
            if direction != Direction():
                message = "several answers are each in a session of its own; ask for one here"
                raise InvalidRequest("n", message)
            return await respond(
                request,
                _start(body, service.conversations.choices(conversation, body.n or 1)),
                partial(_read_choices, head),
                (lambda found: CompletionChunks(head, found.turns, options))
                if body.stream
                else None,
                settings,
                report_changes(service, body),
            )
        return await respond(
            request,
            _start(body, service.conversations.start(conversation, direction)),
            partial(read_answer, partial(build_completion, head)),
            (lambda found: CompletionChunks(head, [found], options)) if body.stream else None,
            settings,
            report_changes(service, body),
        )


async def _start(body: ChatCompletionBody, starting: Coroutine[Any, Any, Found]) -> Found:
    """Start one answer or several. Raises an error of a tool by its place in the request."""
    try:
        return await starting
    except InvalidRequest as error:
        error.details["field"] = body.get_place(str(error.details.get("field", "")))
        raise


async def _read_choices(head: Head, found: Choices) -> dict[str, Any]:
    """Read all answers to their ends and build their object."""
    received: list[list[TurnProgress]] = [[] for _ in found.turns]
    async for each in found.stream:
        received[each.choice].append(each.progress)
    return build_completions(head, [get_outcome(one) for one in received], found.turns)
