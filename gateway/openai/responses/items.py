"""Items of the Responses API, and the messages that they stand for.

Neighbouring text, reasoning and calls of an assistant are one message, as chat completions say it,
so both APIs find the same session.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from gateway.conversation_bodies import Wire
from gateway.openai.responses.ids import Side, TurnName
from gateway.openai.schemas import ROLES, join_parts
from gateway.rest.schemas.base import Name
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message, ToolCall
from kvrecall.domain.session import Turn

Json = dict[str, Any]


class MessageItem(Wire):
    """Message; its content is text or parts."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json] | None = None


class CallItem(Wire):
    """Call of a tool that the model asked for."""

    call_id: Name
    name: Name
    arguments: str = "{}"


class OutputItem(Wire):
    """Result of a call: text or parts."""

    call_id: Name
    output: str | list[Json]


class ReasoningItem(Wire):
    """Reasoning of an answer. The session has it as it was said; what a client sends is not read."""

    summary: list[Json] | None = None
    content: list[Json] | None = None
    encrypted_content: str | None = None


Item = MessageItem | CallItem | OutputItem | ReasoningItem
_KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


@dataclass(frozen=True)
class PlacedItem:
    """An item, and where in the request it stands."""

    item: Item
    field: str

    @property
    def kind(self) -> str:
        """The type of the item."""
        return next(kind for kind, known in _KINDS.items() if isinstance(self.item, known))


@dataclass(frozen=True)
class Messages:
    """The messages that items stand for, and where in the request each begins."""

    messages: tuple[Message, ...]
    fields: tuple[str, ...]


def parse_item(item: Json, field: str) -> PlacedItem:
    """Check an item. Raises InvalidRequest with its place."""
    kind = item.get("type") or "message"
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        message = f"items of type {kind!r} are not supported"
        raise InvalidRequest(f"{field}.type", message, openai_code="unsupported_content")
    try:
        parsed = known.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        raise InvalidRequest(f"{field}{path}", first["msg"]) from error
    _get_text(PlacedItem(parsed, field))  # refuses a part that is no text
    return PlacedItem(parsed, field)


def to_messages(items: Sequence[PlacedItem]) -> Messages:
    """Convert items to messages, in order."""
    messages: list[Message] = []
    fields: list[str] = []
    answering = False  # the last message is an answer that goes on
    for placed in items:
        message = _to_message(placed)
        if message is None:
            continue
        if answering and message.role == "assistant":
            before = messages[-1]
            messages[-1] = replace(
                before,
                content=before.content + message.content,
                tool_calls=(*before.tool_calls, *message.tool_calls),
            )
        else:
            messages.append(message)
            fields.append(placed.field)
        answering = message.role == "assistant"
    return Messages(tuple(messages), tuple(fields))


def to_item(placed: PlacedItem, id: str) -> Json:
    """Convert an item that a client sent to the form in which it is read again."""
    item = placed.item
    match item:
        case MessageItem():
            return _build_message(item.role, _to_parts(item), id)
        case CallItem():
            return build_call(ToolCall(item.call_id, item.name, item.arguments or "{}"), id)
        case OutputItem():
            return _build_output(item.call_id, _get_text(placed), id)
        case ReasoningItem():
            known = item.model_dump(exclude_none=True)
            return {"id": id, "type": "reasoning", "summary": [], **known}


def read_turn(turn: Turn, hidden: int = 0, answer: bool = True) -> list[Json]:
    """Return the items of a committed turn: its input but for the `hidden` first, and its answer."""
    asked = [item for message in turn.messages for item in _split(message)]
    items = _name_items(turn, "i", asked)[hidden:]
    if answer and turn.outcome.message is not None:
        items += _name_items(turn, "o", list(_split(turn.outcome.message)))
    return items


def build_call(call: ToolCall, id: str, status: str = "completed") -> Json:
    """Build the item of a call."""
    return {
        "id": id,
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }


def build_answer(
    text: str, id: str, status: str = "completed", logprobs: Sequence[Json] = ()
) -> Json:
    """Build the item of an answer's text."""
    return _build_message("assistant", [build_text(text, logprobs)], id, status)


def build_text(text: str, logprobs: Sequence[Json] = ()) -> Json:
    """Build the part of a text that the model generated."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def build_reasoning(text: str, id: str, status: str = "completed") -> Json:
    """Build the item of what the model reasoned before an answer."""
    return {
        "id": id,
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def _name_items(turn: Turn, side: Side, items: Sequence[Json]) -> list[Json]:
    name = TurnName(turn.session, turn.number)
    return [
        item | {"id": name.item(item["type"], side, number)} for number, item in enumerate(items)
    ]


def _build_message(role: str, content: list[Json], id: str, status: str = "completed") -> Json:
    return {"id": id, "type": "message", "status": status, "role": role, "content": content}


def _build_output(call: str, output: str, id: str) -> Json:
    return {
        "id": id,
        "type": "function_call_output",
        "status": "completed",
        "call_id": call,
        "output": output,
    }


def _to_message(placed: PlacedItem) -> Message | None:
    item = placed.item
    match item:
        case MessageItem():
            return Message(ROLES.get(item.role, item.role), _get_text(placed))
        case CallItem():
            call = ToolCall(item.call_id, item.name, item.arguments or "{}")
            return Message("assistant", tool_calls=(call,))
        case OutputItem():
            return Message("tool", _get_text(placed), tool_call_id=item.call_id)
        case ReasoningItem():
            return None


def _get_text(placed: PlacedItem) -> str:
    """Return the text of an item. Raises InvalidRequest for an image, audio or a file."""
    match placed.item:
        case MessageItem(content=content):
            return join_parts(content, f"{placed.field}.content")
        case OutputItem(output=output):
            return join_parts(output, f"{placed.field}.output")
    return ""


def _to_parts(item: MessageItem) -> list[Json]:
    """Return the parts of a message; a refusal stays one."""
    content = item.content
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return [
        {"type": "refusal", "refusal": part["refusal"]}
        if part["type"] == "refusal"
        else _build_part(item.role, part["text"])
        for part in parts
    ]


def _build_part(role: str, text: str) -> Json:
    return build_text(text) if role == "assistant" else {"type": "input_text", "text": text}


def _split(message: Message) -> Iterable[Json]:
    """Yield the items that a message stands for, without ids."""
    if message.role == "tool":
        yield _build_output(message.tool_call_id, message.content, "")
        return
    if message.reasoning:
        yield build_reasoning(message.reasoning, "")
    if message.content or not message.tool_calls:
        yield _build_message(message.role, [_build_part(message.role, message.content)], "")
    for call in message.tool_calls:
        yield build_call(call, "")
