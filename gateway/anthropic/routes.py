"""Routes of Anthropic's API: messages and counts of their tokens."""

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request

from gateway.anthropic.blocks import PlacedMessage, split_opening
from gateway.anthropic.messages import PING, MessageEvents, build_message, parse_message_id
from gateway.anthropic.schemas import MessagesBody, PromptBody
from gateway.conversation.answers import read_answer, require_model, respond
from gateway.conversation.bodies import begin_answer
from gateway.conversation.directives import read_directives, report_changes
from gateway.http.idempotency import Key, get_idempotency_key
from gateway.http.settings import GatewaySettings
from gateway.http.tenants import Tenant
from kvrecall.domain.errors import InvalidRequest, UnknownMessage, UnknownSession
from services.conversations.continuation import Continuation, Conversation
from services.service import SessionService

_STREAM = {
    "description": "The message, or the stream of its events.",
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}
_PLACE = re.compile(r"messages\[(\d+)\](?:\.(\w+))?")
# Names of a session's members in this API.
_MEMBERS = {"tool_call_id": ".tool_use_id"}
_FIELDS = {
    "response_format": "output_config.format.schema",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
_TOOL_MEMBERS = {".function.parameters": ".input_schema", ".function.strict": ".strict"}


def add_anthropic_routes(
    router: APIRouter, service: SessionService, settings: GatewaySettings
) -> None:
    """Add the routes of Anthropic's API."""

    @router.post("/messages", responses={200: _STREAM}, tags=["anthropic"])
    async def create_message(
        request: Request, body: MessagesBody, key: Key = None, tenant: Tenant = ""
    ) -> Any:
        """Answer a conversation, in the session that holds it already.

        `thread` `create` is a plain request, and `continue` says only what follows the message of
        an earlier answer. The headers `kvrecall-session`, `kvrecall-match` (continued, forked,
        built, repeated) and `kvrecall-turn` tell which session it is, and how it was found.
        """
        require_model(body.model, service, settings)
        body = read_directives(request, body)
        body.require_honoured()
        placed, opening = split_opening(body.messages_to_domain(service.limits))
        turn = body.turn_to_domain(service.limits, service.default_sampling)
        if opening is not None:
            turn = begin_answer(turn, opening.message, opening.field)
        conversation = Conversation(
            tuple(each.message for each in placed),
            body.settings_to_domain(tenant, service.info.template_variables),
            turn,
            get_idempotency_key(request, key, body),
        )
        return await respond(
            request,
            _start(service, body, conversation, placed),
            partial(read_answer, partial(build_message, body.model, body.marks_cache)),
            partial(MessageEvents, body.model, body.marks_cache, opening is not None)
            if body.stream
            else None,
            settings,
            report_changes(service, body, partial(_rename, placed=placed)),
            PING,
        )

    @router.post("/messages/count_tokens", tags=["anthropic"])
    async def count_message_tokens(body: PromptBody) -> dict[str, int]:
        """Count the tokens of a conversation with its tools, up to where the answer begins."""
        require_model(body.model, service, settings)
        if body.goes_on:
            raise InvalidRequest("thread", "count the whole conversation, without a thread")
        placed, opening = split_opening(body.messages_to_domain(service.limits))
        messages = [each.message for each in placed]
        if not messages:
            raise InvalidRequest("messages", "a conversation has at least one message")
        tools = [tool.to_domain() for tool in body.session_tools]
        begun = "" if opening is None else opening.message.content
        arguments = body.choose_arguments(
            body.chat_template_kwargs or {}, service.info.template_variables, body.ignored
        )
        tokens = await service.count_tokens(messages, tools, begun, json.dumps(arguments))
        return {"input_tokens": tokens}


async def _start(
    service: SessionService,
    body: MessagesBody,
    conversation: Conversation,
    placed: Sequence[PlacedMessage],
) -> Continuation:
    """Start the turn. Raises an error of a message by the message's place in the request."""
    thread = body.thread
    try:
        if thread is None or thread.type == "create":
            direction = body.kvrecall.direction
            return await service.conversations.start(conversation, direction)
        return await _follow(service, body, conversation, thread.previous_message_id or "")
    except InvalidRequest as error:
        error.details["field"] = _rename(str(error.details.get("field", "")), placed)
        raise


async def _follow(
    service: SessionService, body: MessagesBody, conversation: Conversation, message_id: str
) -> Continuation:
    """Start the turn that follows a message of a thread. Raises UnknownMessage.

    Raises InvalidRequest for what the thread was created with and cannot be changed.
    """
    own = ("system", "tools", "chat_template_kwargs")
    fixed = [name for name in own if getattr(body, name)]
    # The salt is compared with that of the thread.
    fixed += ["kvrecall"] if body.kvrecall.model_fields_set - {"cache_salt"} else []
    if fixed:
        message = "a thread keeps what it was created with; leave this out, or create a new one"
        details = {"error_code": "thread_fingerprint_mismatch"}
        raise InvalidRequest(fixed[0], message, anthropic_details=details)
    place = parse_message_id(message_id)
    if place is None:
        raise UnknownMessage(message_id)
    try:
        return await service.conversations.follow(place, conversation)
    except UnknownSession as error:
        raise UnknownMessage(message_id) from error


def _rename(field: str, placed: Sequence[PlacedMessage]) -> str:
    """Return the field of the request that a field of the session's messages came from."""
    found = _PLACE.match(field)
    if found is None:
        for member, own in _TOOL_MEMBERS.items():
            field = field.replace(member, own)
        return _FIELDS.get(field, field)
    return placed[int(found[1])].field + _MEMBERS.get(found[2] or "", "")
