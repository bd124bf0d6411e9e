"""Content blocks of Anthropic's messages, and the messages that a session holds of them.

One message of a client becomes several where it brings results of tools, and these have their own
places in errors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from gateway.conversation_bodies import Wire
from gateway.rest.schemas.base import Name
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message, ToolCall

Content = str | list[dict[str, Any]] | None
# The result of a failed call that says nothing: the model would take an empty one for a success.
_FAILED = "error"


class TextBlock(Wire):
    """Text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Wire):
    """Tool call of the assistant."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]


class ToolResultBlock(Wire):
    """Result of a tool call, or with `is_error` the reason of its failure."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ThinkingBlock(Wire):
    """Reasoning: the session holds what the model said, so what a client repeats is not read."""

    type: Literal["thinking", "redacted_thinking"]


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
_KINDS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": ThinkingBlock,
    },
}


@dataclass(frozen=True)
class PlacedMessage:
    """A message, and its field in the request."""

    field: str
    message: Message


def to_placed_messages(role: str, content: Content, field: str) -> Iterator[PlacedMessage]:
    """Convert a client's message: its text, and before that the results that it brings.

    Raises InvalidRequest for a block that such a message cannot have, by its place.
    """
    texts: list[str] = []
    calls: list[ToolCall] = []
    only_results = not isinstance(content, str) and bool(content)
    for place, block in _parse(role, content, field):
        match block:
            case TextBlock(text=text):
                texts.append(text)
                only_results = False
            case ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, json.dumps(block.input)))
            case ToolResultBlock():
                yield PlacedMessage(place, _to_result(block, place))
    if role != "user" or not only_results:
        yield PlacedMessage(field, Message(role, "".join(texts), tuple(calls)))


def split_opening(
    placed: Sequence[PlacedMessage],
) -> tuple[Sequence[PlacedMessage], PlacedMessage | None]:
    """Return the messages before the answer, and the one that the client has begun it with.

    Raises InvalidRequest for one that ends with white space, as Anthropic's API does.
    """
    if not placed or placed[-1].message.role != "assistant" or placed[-1].message.tool_calls:
        return placed, None
    opening = placed[-1]
    if opening.message.content != opening.message.content.rstrip():
        message = "messages: final assistant content cannot end with trailing whitespace"
        raise InvalidRequest(opening.field, message)
    return placed[:-1], opening


def _to_result(block: ToolResultBlock, field: str) -> Message:
    texts = [block.text for _, block in _parse("system", block.content, field)]
    text = "".join(texts) or (_FAILED if block.is_error else "")
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _parse(role: str, content: Content, field: str) -> Iterator[tuple[str, Any]]:
    """Yield the blocks of a content with their fields; a string is one of text."""
    if isinstance(content, str):
        yield f"{field}.content", TextBlock(type="text", text=content)
        return
    for index, block in enumerate(content or ()):
        yield from _parse_block(_KINDS[role], block, f"{field}.content[{index}]")


def _parse_block(
    kinds: Mapping[str, type[Block]], block: Mapping[str, Any], field: str
) -> Sequence[tuple[str, Block]]:
    kind = kinds.get(str(block.get("type")))
    if kind is None:
        wanted = ", ".join(kinds)
        message = f"blocks of type {block.get('type')!r} are not supported here; send {wanted}"
        raise InvalidRequest(f"{field}.type", message)
    try:
        return [(field, kind.model_validate(block))]
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{field}.{path}", first["msg"]) from error
