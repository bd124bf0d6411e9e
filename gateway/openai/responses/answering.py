"""From the body of a request for a response to its turn, and to what is stored of it."""

import json
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.http.sse import read_outcome
from gateway.openai.responses import objects
from gateway.openai.responses.compaction import INSTRUCTION, build_compacted
from gateway.openai.responses.events import ResponseEvents
from gateway.openai.responses.ids import ItemPlace, TurnName, name_attempt
from gateway.openai.responses.items import (
    PlacedItem,
    is_left_out,
    is_needed,
    parse_item,
    read_turn,
    to_item,
    to_messages,
)
from gateway.openai.responses.schemas import ResponseBody
from gateway.openai.responses.tools import Toolbox
from kvrecall.domain.errors import (
    CallsOutstanding,
    InvalidRequest,
    LimitExceeded,
    ServiceError,
    UnknownResponse,
)
from kvrecall.domain.messages import Message
from kvrecall.domain.reports import TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.turn_request import check_message
from services.catalog.records import IdempotencyKey
from services.catalog.responses import StoredItem, StoredResponse
from services.conversations.continuation import Continuation, Conversation, Direction
from services.conversations.responses import AnswerClaim, RecordedStream
from services.service import SessionService

Json = dict[str, Any]
_MESSAGE = re.compile(r"messages\[(\d+)\]")
IN_PROGRESS = "in_progress"


class Answering:
    """A request for a response on its way."""

    def __init__(self, service: SessionService, tenant: str, body: ResponseBody) -> None:
        self._service = service
        self.tenant = tenant
        self._body = body
        self._items: list[PlacedItem] = []
        self._claim: AnswerClaim | None = None
        self._events: ResponseEvents | None = None
        self._fields: tuple[str, ...] = ()
        self._tolerance = body.tolerate(service.limits)

    def _build_settings(self) -> CreateSession:
        """Build the settings of the session that the conversation would begin. Raises InvalidRequest."""
        variables = self._service.info.template_variables
        return self._body.settings_to_domain(self.tenant, variables)

    def get_place(self, field: str) -> str:
        """Return the name in this request of a field of the messages."""
        found = _MESSAGE.match(field)
        return field if found is None else self._fields[int(found[1])]

    async def start(self, key: IdempotencyKey | None) -> Continuation:
        """Start the turn; what comes of it is stored before its stream passes on its end.

        Raises as `Conversations.turn`, with the places of this request; UnknownConversation, and
        SessionBusy while the conversation gets another answer.
        """
        self._items = await self._read_input()
        conversation = self._body.conversation_id
        if conversation is not None:
            self._claim = await self._service.named_conversations.claim(conversation, self.tenant)
        try:
            found = await self._start(key)
        except BaseException:
            await self._close()
            raise
        attempt = ""
        if self._body.background:
            attempt = name_attempt(None if key is None else key.key)
        name = TurnName(found.session, found.turn, attempt)
        self._events = ResponseEvents(self._build_head(name), name, found.appended_tokens)
        # Events put the answer together, whether or not they are sent.
        encoded = self._body.stream or self._body.background
        stream = RecordedStream(
            found.stream,
            self._record(found),
            self._close,
            None if encoded else self._events.encode,
        )
        return replace(found, stream=stream)

    def encode_refusal(self, problem: Mapping[str, Any]) -> bytes:
        """Encode the events of a response that failed before it had a turn."""
        name = TurnName(secrets.token_hex(12), 1)
        events = ResponseEvents(self._build_head(name), name, 0)
        return events.begin() + events.fail(problem)

    def _build_head(self, name: TurnName) -> Json:
        created = int(time.time())
        return objects.build_head(
            name.response, created, self._body, self._service.default_sampling
        )

    async def count(self) -> int:
        """Count the tokens of the whole conversation with the input. Raises as `start`."""
        messages = [*self._body.opening, *await self._read_all()]
        if not messages:
            raise InvalidRequest("input", "there is nothing to count")
        for index, message in enumerate(messages, -len(self._body.opening)):
            check_message(message, self._fields[index] if index >= 0 else "instructions")
        settings = self._build_settings()
        return await self._service.count_tokens(
            messages, settings.tools, template_arguments=settings.template_arguments
        )

    async def compact(self) -> Json:
        """Let the model summarize the whole conversation, in a session of its own. Raises as `start`.

        Return what a client goes on with instead: what users have said, and the summary.
        """
        messages = await self._read_all()
        if not messages:
            raise InvalidRequest("input", "there is nothing to compact")
        conversation = Conversation(
            (*messages, Message("user", INSTRUCTION)),
            self._build_settings(),
            self._body.turn_to_domain(self._service.limits, self._service.default_sampling),
            opening=self._body.opening,
        )
        try:
            found = await self._service.conversations.start(conversation, Direction(alone=True))
        except ServiceError as error:
            raise self._to_place(error) from error
        try:
            outcome = await read_outcome(found.stream)
        finally:
            await found.stream.aclose()
        name = TurnName(found.session, found.turn)
        said = [message.content for message in messages if message.role == "user"]
        summary = "" if outcome.message is None else outcome.message.content
        usage = objects.build_usage(outcome, found.appended_tokens)
        return build_compacted(name, int(time.time()), said, summary, usage)

    def encode(self, found: Continuation) -> ResponseEvents:
        """Return the encoder of the turn's events."""
        assert self._events is not None, "the turn was started"
        return self._events

    def build(self, outcome: TurnOutcome, found: Continuation) -> Json:
        """Build the response."""
        return self.encode(found).complete(outcome)

    async def _read_all(self) -> list[Message]:
        """Return the whole conversation but for its instructions. Raises InvalidRequest."""
        self._items = await self._read_input()
        previous = await self._read_previous()
        given = to_messages([*await self._read_conversation(), *self._items])
        before: list[Message] = []
        if previous is not None:
            before = await self._service.conversations.read(previous, self._body.salt)
        self._fields = (*("previous_response_id" for _ in before), *given.fields)
        return [*before, *given.messages]

    async def _start(self, key: IdempotencyKey | None) -> Continuation:
        direction = self._body.direction
        given = to_messages([*await self._read_conversation(), *self._items])
        previous = await self._read_previous()
        self._fields = given.fields
        if not given.messages:
            raise InvalidRequest("input", "there is nothing to answer")
        conversation = Conversation(
            given.messages,
            replace(self._build_settings(), stored=self._body.store is not False),
            self._body.turn_to_domain(self._service.limits, self._service.default_sampling),
            key,
            self._body.opening,
            previous,
            in_background=self._body.background is True,
        )
        try:
            return await self._service.conversations.start(conversation, direction)
        except UnknownResponse as error:
            raise _no_previous(self._body.previous_response_id) from error
        except ServiceError as error:
            raise self._to_place(error) from error

    def _record(self, found: Continuation) -> Callable[[TurnOutcome], Awaitable[None]]:
        """Return the function that stores what came of the turn."""

        async def store(outcome: TurnOutcome) -> None:
            response = self.build(outcome, found)
            # First, so that a reader of the ended response finds it in its conversation.
            if self._body.conversation_id is not None:
                added = self._build_added(found, response)
                await self._service.named_conversations.add_answer(
                    self._body.conversation_id, added
                )
            if response["store"]:
                reply = outcome.message or Message("assistant")
                await self.store(found, response, found.history(reply))

        return store

    async def _close(self) -> None:
        """Let the next request write the conversation."""
        if self._claim is not None:
            await self._claim.release()

    async def store(self, found: Continuation, response: Json, history: bytes) -> None:
        """Store the response, unless it is one in the background that was cancelled or deleted.

        `history` is the digest of the conversation up to the answer's end, or up to the answer of a
        response that has not ended. Raises UnknownResponse.
        """
        if response["background"] and response["status"] != IN_PROGRESS:
            stored = await self._service.responses.get(response["id"], self.tenant)
            if json.loads(stored.body)["status"] != IN_PROGRESS:
                return
        await self._service.responses.store(
            StoredResponse(
                response["id"],
                self.tenant,
                found.session,
                found.turn,
                found.opening.hex(),
                history.hex(),
                len(self._body.opening),
                json.dumps(response),
            )
        )

    def _build_added(self, found: Continuation, response: Json) -> list[StoredItem]:
        """Build the items that a conversation gets: those of this request, and of its answer."""
        name = self.encode(found).name
        asked = [
            to_item(placed, name.item(placed.kind, "c", number))
            for number, placed in enumerate(self._items)
        ]
        return [StoredItem(item["id"], json.dumps(item)) for item in (*asked, *response["output"])]

    async def _read_input(self) -> list[PlacedItem]:
        """Check the items of the input; those that are named by their ids are looked up."""
        body = self._body
        if body.input is None or isinstance(body.input, str):
            texts = [] if body.input is None else [{"role": "user", "content": body.input}]
            return [parse_item(item, "input", self._tolerance) for item in texts]
        items = []
        most = room = self._service.limits.max_conversation_bytes
        for index, item in enumerate(body.input):
            field = f"input[{index}]"
            if self._tolerance.mends and not is_needed(item):
                body.ignored.note(field, str(item.get("type")))
                continue
            if item.get("type") == "item_reference":
                item = await _resolve(self._service, self.tenant, item.get("id"), field)
                room -= len(json.dumps(item))
                if room < 0:
                    raise LimitExceeded(field, f"the items named have more than {most} bytes", most)
            placed = parse_item(item, field, self._tolerance)
            if is_left_out(placed):
                body.ignored.note(field, placed.kind)
            items.append(placed)
        return items

    def _to_place(self, error: ServiceError) -> ServiceError:
        """Name the place in this request that an error of the messages is about."""
        if isinstance(error, CallsOutstanding):
            message = f"No tool output found for function call {', '.join(error.calls)}."
            return InvalidRequest("input", message, openai_code="tool_result_missing")
        field = error.details.get("field")
        if field in ("messages", "response_format"):
            error.details["field"] = "input" if field == "messages" else ResponseBody.form_field
        elif isinstance(field, str) and field.startswith("tools["):
            number, _, member = field.removeprefix("tools[").partition("].function.")
            error.details["field"] = self._body.toolbox.find_place(int(number), member)
        elif isinstance(field, str) and field.startswith("messages["):
            error.details["field"] = self.get_place(field)
        return error

    async def _read_conversation(self) -> Sequence[PlacedItem]:
        conversation = self._body.conversation_id
        if conversation is None:
            return ()
        asked = [StoredItem("", json.dumps(to_item(placed, ""))) for placed in self._items]
        items = await self._service.named_conversations.get_all(conversation, self.tenant, asked)
        return [
            parse_item(json.loads(item.body), "conversation", self._tolerance) for item in items
        ]

    async def _read_previous(self) -> StoredResponse | None:
        previous = self._body.previous_response_id
        if previous is None:
            return None
        try:
            found = await self._service.responses.get(previous, self.tenant)
        except UnknownResponse as error:
            raise _no_previous(previous) from error
        if not objects.is_committed(json.loads(found.body)):
            raise _no_previous(previous)
        return found


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
            # As calls of functions they stand for the same messages.
            items = [item for turn in turns for item in read_turn(turn, Toolbox({}), None)]
    except ServiceError:
        return None
    return next((item for item in items if item["id"] == id), None)


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
