"""From the body of a request for a response to its turn, and to what is stored of it."""

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from gateway.openai.responses.events import ResponseEvents
from gateway.openai.responses.ids import ItemPlace, TurnName
from gateway.openai.responses.items import (
    Messages,
    PlacedItem,
    parse_item,
    read_turn,
    to_item,
    to_messages,
)
from gateway.openai.responses.schemas import ResponseBody
from kvrecall.domain.errors import (
    CallsOutstanding,
    InvalidRequest,
    ServiceError,
    UnknownResponse,
)
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.turn_request import check_message
from services.catalog.records import IdempotencyKey
from services.catalog.responses.base import StoredItem, StoredResponse
from services.conversations.matching import Continuation, Conversation
from services.conversations.named import ConversationClaim
from services.conversations.responses import RecordedStream
from services.service import SessionService

Json = dict[str, Any]


class Answering:
    """A request for a response on its way."""

    def __init__(self, service: SessionService, tenant: str, body: ResponseBody) -> None:
        self._service = service
        self._tenant = tenant
        self._body = body
        self._items: list[PlacedItem] = []
        self._claim: ConversationClaim | None = None
        self._events: ResponseEvents | None = None

    async def start(self, key: IdempotencyKey | None) -> Continuation:
        """Start the turn; what comes of it is stored before its stream passes on its end.

        Raises as `Conversations.turn`, with the places of this request; UnknownConversation, and
        SessionBusy while the conversation gets another answer.
        """
        self._items = await _read_input(self._service, self._tenant, self._body)
        conversation = self._body.conversation_id
        if conversation is not None:
            self._claim = await self._service.named_conversations.claim(conversation, self._tenant)
        try:
            found = await self._start(key)
        except BaseException:
            await self._close()
            raise
        self._events = ResponseEvents(self._body, found)
        stream = RecordedStream(
            found.stream,
            self._record(found),
            self._close,
            None if self._body.stream else self._events.encode,
        )
        return replace(found, stream=stream)

    async def count(self) -> int:
        """Count the tokens of the whole conversation with the input. Raises as `start`."""
        self._items = await _read_input(self._service, self._tenant, self._body)
        previous = await self._read_previous()
        said = to_messages([*await self._read_conversation(), *self._items])
        before = [] if previous is None else await self._service.conversations.read(previous)
        messages = [*self._body.opening, *before, *said.messages]
        if not messages:
            raise InvalidRequest("input", "there is nothing to count")
        for index, message in enumerate(said.messages):
            check_message(message, said.fields[index])
        tools = self._body.settings_to_domain(self._tenant).tools
        return await self._service.count_tokens(messages, tools)

    def encode(self, found: Continuation) -> ResponseEvents:
        """Return the encoder of the turn's events."""
        assert self._events is not None, "the turn was started"
        return self._events

    def build(self, outcome: TurnOutcome, found: Continuation) -> Json:
        """Build the response."""
        return self.encode(found).complete(outcome)

    async def _start(self, key: IdempotencyKey | None) -> Continuation:
        said = to_messages([*await self._read_conversation(), *self._items])
        previous = await self._read_previous()
        if not said.messages:
            raise InvalidRequest("input", "there is nothing to answer")
        settings = self._body.settings_to_domain(self._tenant)
        conversation = Conversation(
            said.messages,
            replace(settings, stored=self._body.store is not False),
            self._body.turn_to_domain(self._service.limits),
            key,
            self._body.opening,
            previous,
        )
        try:
            return await self._service.conversations.turn(conversation)
        except UnknownResponse as error:
            raise _no_previous(self._body.previous_response_id) from error
        except ServiceError as error:
            raise _to_place(error, said) from error

    def _record(self, found: Continuation) -> Callable[[TurnOutcome], Awaitable[None]]:
        """Return the function that stores what came of the turn."""

        async def store(outcome: TurnOutcome) -> None:
            response = self.build(outcome, found)
            if response["store"]:
                await self._store(found, outcome, response)
            if self._body.conversation_id is not None:
                added = self._build_added(found, response)
                await self._service.named_conversations.add_answer(
                    self._body.conversation_id, added
                )

        return store

    async def _close(self) -> None:
        """Let the next request write the conversation."""
        if self._claim is not None:
            await self._claim.release()

    async def _store(self, found: Continuation, outcome: TurnOutcome, response: Json) -> None:
        reply = outcome.message or Message("assistant")
        await self._service.responses.store(
            StoredResponse(
                response["id"],
                self._tenant,
                found.session,
                outcome.turn,
                found.opening.hex(),
                found.history(reply).hex(),
                len(self._body.opening),
                json.dumps(response),
            )
        )

    def _build_added(self, found: Continuation, response: Json) -> list[StoredItem]:
        """Build the items that a conversation gets: those of this request, and of its answer."""
        name = TurnName(found.session, found.turn)
        asked = [
            to_item(placed, name.item(placed.kind, "c", number))
            for number, placed in enumerate(self._items)
        ]
        return [StoredItem(item["id"], json.dumps(item)) for item in (*asked, *response["output"])]

    async def _read_conversation(self) -> Sequence[PlacedItem]:
        conversation = self._body.conversation_id
        if conversation is None:
            return ()
        items = await self._service.named_conversations.get_items(conversation, self._tenant)
        most = self._service.limits.max_conversation_items
        if len(items) + len(self._items) >= most:
            message = f"conversation {conversation!r} has {len(items)} of at most {most} items"
            raise InvalidRequest("conversation", message)
        return [parse_item(json.loads(item.body), "conversation") for item in items]

    async def _read_previous(self) -> StoredResponse | None:
        previous = self._body.previous_response_id
        if previous is None:
            return None
        try:
            return await self._service.responses.get(previous, self._tenant)
        except UnknownResponse as error:
            raise _no_previous(previous) from error


async def find_item(service: SessionService, tenant: str, id: str) -> Json | None:
    """Return the item of a stored response, or of what led to one; None if there is none."""
    place = ItemPlace.parse(id)
    if place is None:
        return None
    try:
        if place.side == "o":
            response = await service.responses.get(place.name.response, tenant)
            items = json.loads(response.body)["output"]
        else:
            await service.get(place.name.session, tenant)
            turns = await service.turns(place.name.session, place.name.turn - 1, 1)
            items = [item for turn in turns for item in read_turn(turn)]
    except ServiceError:
        return None
    return next((item for item in items if item["id"] == id), None)


async def _read_input(service: SessionService, tenant: str, body: ResponseBody) -> list[PlacedItem]:
    """Check the items of the input; those that are named by their ids are looked up."""
    if body.input is None or isinstance(body.input, str):
        texts = [] if body.input is None else [{"role": "user", "content": body.input}]
        return [parse_item(item, "input") for item in texts]
    items = []
    for index, item in enumerate(body.input):
        field = f"input[{index}]"
        if item.get("type") == "item_reference":
            item = await _resolve(service, tenant, item.get("id"), field)
        items.append(parse_item(item, field))
    return items


async def _resolve(service: SessionService, tenant: str, id: object, field: str) -> Json:
    found = await find_item(service, tenant, id) if isinstance(id, str) else None
    if found is None:
        raise InvalidRequest(
            f"{field}.id", f"there is no item {id!r}", openai_code="item_not_found"
        )
    return found


def _no_previous(id: object) -> InvalidRequest:
    return InvalidRequest(
        "previous_response_id",
        f"Previous response with id {id!r} not found.",
        openai_code="previous_response_not_found",
    )


def _to_place(error: ServiceError, said: Messages) -> ServiceError:
    """Name the place in this request that an error of the messages is about."""
    if isinstance(error, CallsOutstanding):
        message = f"No tool output found for function call {', '.join(error.calls)}."
        return InvalidRequest("input", message, openai_code="tool_result_missing")
    field = error.details.get("field")
    if field in ("messages", "response_format"):
        error.details["field"] = "input" if field == "messages" else ResponseBody.form_field
    elif isinstance(field, str) and field.startswith("tools["):
        error.details["field"] = field.replace(".function.", ".", 1)
    elif isinstance(field, str) and field.startswith("messages["):
        index = int(field.removeprefix("messages[").partition("]")[0])
        error.details["field"] = said.fields[index]
    return error
