"""Messages, tool calls and tool definitions, in the format of the OpenAI API.

The client has one `Message` for what it sends and what it reads. A response has one of two forms of it,
without the members that have no value there.
"""

import json
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field

from gateway.rest.schemas.base import Body, JsonObject, Name
from kvrecall import client
from kvrecall.domain.messages import Message, ToolCall


class FunctionBody(Body):
    """Function name and arguments of a tool call."""

    name: Name
    arguments: str = Field(description="JSON text of an object.", examples=['{"city": "Bern"}'])


class ToolCallBody(Body):
    """Tool call of an assistant message, as in the OpenAI API."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionBody

    def to_domain(self) -> ToolCall:
        """Convert to the domain value."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class MessageBody(Body):
    """Message, as in the OpenAI API. `content` may be null when there are tool calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=128)
    tool_call_id: Name | None = None
    name: Name | None = None
    reasoning: str | None = Field(
        default=None,
        description="Of a reply that is sent back: what was said before it. The chat template may drop it.",
    )

    def to_domain(self) -> Message:
        """Convert to the domain value."""
        calls = tuple(call.to_domain() for call in self.tool_calls or ())
        return Message(
            self.role,
            self.content or "",
            calls,
            self.tool_call_id or "",
            self.name or "",
            (self.reasoning or "") if self.role == "assistant" else "",
        )


class ToolFunctionBody(Body):
    """Name, description and JSON schema of the parameters of a tool."""

    model_config = ConfigDict(extra="allow")

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = Field(
        default=None,
        description="Every call has arguments of the schema, or the tool is refused with the "
        "keyword that cannot be followed. Otherwise it is followed as far as it can be.",
    )


class ToolBody(Body):
    """Tool that the model may call, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: ToolFunctionBody

    def to_domain(self) -> str:
        """Convert to the JSON text that a session has."""
        return json.dumps(self.model_dump(exclude_unset=True) | {"type": "function"})


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """Assistant message, as in the OpenAI API. `reasoning` is what the model said before it."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: tuple[client.ToolCall, ...] | None = None
    reasoning: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoggedMessage:
    """Message of a turn, as in the OpenAI API."""

    role: str
    content: str
    tool_calls: tuple[client.ToolCall, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


def to_tool_call(call: ToolCall) -> client.ToolCall:
    """Convert a tool call."""
    return client.ToolCall(call.id, client.Function(call.name, call.arguments))


def to_assistant_message(message: Message | None) -> AssistantMessage | None:
    """Convert what a turn generated; None for nothing."""
    if message is None:
        return None
    calls = _to_tool_calls(message)
    return AssistantMessage(
        content=message.content or (None if calls else ""),
        tool_calls=calls,
        reasoning=message.reasoning or None,
    )


def to_logged_message(message: Message) -> LoggedMessage:
    """Convert a message of a turn's input."""
    return LoggedMessage(
        role=message.role,
        content=message.content,
        tool_calls=_to_tool_calls(message),
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
        reasoning=message.reasoning or None,
    )


def _to_tool_calls(message: Message) -> tuple[client.ToolCall, ...] | None:
    return tuple(to_tool_call(call) for call in message.tool_calls) or None
