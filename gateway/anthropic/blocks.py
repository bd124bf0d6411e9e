"""Content blocks of Anthropic's messages, and the messages that a session holds of them.

One message of a client becomes several where it brings results of tools, and these have their own
places in errors.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from gateway.anthropic.block_texts import TREATMENTS, read_block
from gateway.conversation.bodies import CallId, Wire
from gateway.conversation.ignored import Tolerance
from gateway.conversation.placeholders import join_pieces
from gateway.rest.schemas.base import Name
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message, ToolCall

Json = Mapping[str, Any]
Content = str | list[dict[str, Any]] | None
# The result of a failed call that says nothing: the model would take an empty one for a success.
_FAILED = "error"


class ToolUseBlock(Wire):
    """Tool call of the assistant."""

    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any] | None = None


class ToolResultBlock(Wire):
    """Result of a tool call, or with `is_error` the reason of its failure."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


_Block = TypeVar("_Block", bound=Wire)


@dataclass(frozen=True)
class PlacedMessage:
    """A message, and its field in the request."""

    field: str
    message: Message


def to_placed_messages(
    role: str, content: Content, field: str, tolerance: Tolerance
) -> Iterator[PlacedMessage]:
    """Convert a client's message: its text, and before that the results that it brings.

    Raises InvalidRequest for a block that such a message cannot have, by its place.
    """
    pieces: list[tuple[str, bool]] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    only_results = not isinstance(content, str) and bool(content)
    for place, block in _place(content, field):
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            use = _validate(ToolUseBlock, block, place)
            calls.append(ToolCall(use.id, use.name, json.dumps(use.input or {})))
        elif kind == "tool_result" and role == "user":
            result = _validate(ToolResultBlock, block, place)
            yield PlacedMessage(place, _to_result(result, place, tolerance))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            text, words = _read(role, block, place, tolerance)
            pieces.append((text, words))
            only_results = only_results and not text and kind != "text"
    if role != "user" or not only_results:
        yield PlacedMessage(
            field,
            Message(role, join_pieces(pieces), tuple(calls), reasoning="\n\n".join(thoughts)),
        )


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


def _to_result(block: ToolResultBlock, field: str, tolerance: Tolerance) -> Message:
    pieces = [
        _read("tool_result", each, place, tolerance) for place, each in _place(block.content, field)
    ]
    text = join_pieces(pieces) or (_FAILED if block.is_error else "")
    return Message("tool", text, tool_call_id=block.tool_use_id)


def _place(content: Content, field: str) -> Iterator[tuple[str, Json]]:
    """Yield the blocks of a content with their fields; a string is one of text."""
    if isinstance(content, str):
        yield f"{field}.content", {"type": "text", "text": content}
        return
    for index, block in enumerate(content or ()):
        yield f"{field}.content[{index}]", block


def _read(role: str, block: Json, field: str, tolerance: Tolerance) -> tuple[str, bool]:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in TREATMENTS:
        own = {"user": ["tool_result"], "assistant": ["tool_use"]}.get(role, [])
        wanted = ", ".join([*TREATMENTS, *own])
        message = f"blocks of type {kind!r} are not supported here; send one of {wanted}"
        raise InvalidRequest(f"{field}.type", message)
    return read_block(block, field, tolerance)


def _validate(kind: type[_Block], block: Json, field: str) -> _Block:
    try:
        return kind.model_validate(block)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{field}.{path}", first["msg"]) from error
