"""Items of the Responses API, and the messages that they stand for.

Neighbouring text, reasoning and calls of an assistant are one message, as chat completions say it,
so both APIs find the same session.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from gateway.conversation_bodies import Wire
from gateway.ignored import Tolerance
from gateway.openai.chat_messages import ROLES
from gateway.openai.parts import is_text, join_parts
from gateway.openai.responses.calls import (
    OUTPUTS,
    ApplyPatchCallItem,
    ApplyPatchOutputItem,
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    LocalShellCallItem,
    LocalShellOutputItem,
    OutputItem,
    ResultItem,
    ShellCallItem,
    ShellOutputItem,
    ToolSearchCallItem,
    ToolSearchOutputItem,
    build_call,
    build_output,
    get_kind,
)
from gateway.openai.responses.hosted_items import HOSTED_ITEMS, LEFT_OUT_ITEMS, HostedItem
from gateway.openai.responses.ids import Side, TurnName
from gateway.openai.responses.tools import Toolbox
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message
from kvrecall.domain.session import Turn

Json = dict[str, Any]


class MessageItem(Wire):
    """Message; its content is text or parts."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Json] | None = None


class ReasoningItem(Wire):
    """Reasoning of an answer. The session has it as it was said; what a client sends is not read."""

    summary: list[Json] | None = None
    content: list[Json] | None = None
    encrypted_content: str | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem | HostedItem
_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "shell_call": ShellCallItem,
    "shell_call_output": ShellOutputItem,
    "local_shell_call": LocalShellCallItem,
    "local_shell_call_output": LocalShellOutputItem,
    "apply_patch_call": ApplyPatchCallItem,
    "apply_patch_call_output": ApplyPatchOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "reasoning": ReasoningItem,
    **dict.fromkeys(HOSTED_ITEMS, HostedItem),
}


@dataclass(frozen=True)
class PlacedItem:
    """An item, its type, and where in the request it stands; `sent`: as the client wrote it."""

    item: Item
    kind: str
    field: str
    sent: Json


@dataclass(frozen=True)
class Messages:
    """The messages that items stand for, and where in the request each begins."""

    messages: tuple[Message, ...]
    fields: tuple[str, ...]


def is_needed(item: Json) -> bool:
    """Return whether a conversation would be another one without an item.

    It is not with a type that nobody knows here, and with a reference to reasoning, which is not
    read.
    """
    kind, id = item.get("type"), item.get("id")
    if kind == "item_reference":
        return not (isinstance(id, str) and id.startswith("rs_"))
    return kind is None or kind in (*_KINDS, "compaction_trigger")


def is_left_out(placed: PlacedItem) -> bool:
    """Return whether an item has no effect."""
    return placed.kind in LEFT_OUT_ITEMS


def parse_item(item: Json, field: str, tolerance: Tolerance) -> PlacedItem:
    """Check an item; its parts become text. Raises InvalidRequest with its place."""
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
    return PlacedItem(_read_parts(parsed, field, tolerance), kind, field, item)


def _read_parts(item: Item, field: str, tolerance: Tolerance) -> Item:
    """Return an item whose parts are text: words where one has none. Raises InvalidRequest."""
    match item:
        case MessageItem(content=list() as content):
            parts = _read_list(content, f"{field}.content", tolerance)
            return item.model_copy(update={"content": parts})
        case OutputItem(output=list() as output):
            parts = _read_list(output, f"{field}.output", tolerance)
            return item.model_copy(update={"output": parts})
    return item


def _read_list(parts: list[Json], field: str, tolerance: Tolerance) -> list[Json]:
    """Return parts of text: the same ones, or one with words for those that are none."""
    text = join_parts(parts, field, tolerance)
    if all(is_text(part) for part in parts):
        return parts
    return [{"type": "text", "text": text}]


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
        case OutputItem():
            return build_output(placed.kind, item.call_id, _get_text(placed), id)
        case ReasoningItem():
            known = item.model_dump(exclude_none=True)
            return {"id": id, "type": "reasoning", "summary": [], **known}
        case _:
            return {"status": "completed", **placed.sent, "id": id, "type": placed.kind}


def read_turn(
    turn: Turn, toolbox: Toolbox, before: Turn | None, hidden: int = 0, answer: bool = True
) -> list[Json]:
    """Return the items of a committed turn: its input but for the `hidden` first, and its answer.

    `toolbox` and the turn before tell the types of its calls and of their outputs.
    """
    earlier = None if before is None else before.outcome.message
    messages = turn.messages if earlier is None else (earlier, *turn.messages)
    kinds = {
        call.id: get_kind(call, toolbox) for message in messages for call in message.tool_calls
    }
    asked = [item for message in turn.messages for item in _split(message, toolbox, kinds)]
    items = _name_items(turn, "i", asked)[hidden:]
    if answer and turn.outcome.message is not None:
        items += _name_items(turn, "o", list(_split(turn.outcome.message, toolbox, kinds)))
    return items


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


def _to_message(placed: PlacedItem) -> Message | None:
    item = placed.item
    match item:
        case MessageItem():
            return Message(ROLES.get(item.role, item.role), _get_text(placed))
        case ReasoningItem():
            return None
        case HostedItem():
            return item.message
    if isinstance(item, CallItem):
        return Message("assistant", tool_calls=(item.call,))
    return Message("tool", _get_text(placed), tool_call_id=item.call_id)


def _get_text(placed: PlacedItem) -> str:
    """Return the text of an item, whose parts are text."""
    content = placed.item.content if isinstance(placed.item, MessageItem | ResultItem) else ""
    if isinstance(content, list):
        return "".join(str(part.get("text", part.get("refusal", ""))) for part in content)
    return content or ""


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


def _split(message: Message, toolbox: Toolbox, kinds: Mapping[str, str]) -> Iterable[Json]:
    """Yield the items that a message stands for, without ids; `kinds`: of calls by their ids."""
    if message.role == "tool":
        kind = OUTPUTS[kinds.get(message.tool_call_id, "function_call")]
        yield build_output(kind, message.tool_call_id, message.content, "")
        return
    if message.reasoning:
        yield build_reasoning(message.reasoning, "")
    if message.content or not message.tool_calls:
        yield _build_message(message.role, [_build_part(message.role, message.content)], "")
    for call in message.tool_calls:
        yield build_call(call, toolbox, "")
