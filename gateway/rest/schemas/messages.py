"""Messages, tool calls and tool definitions, in the format of the OpenAI API."""

import json
from typing import Literal

from pydantic import ConfigDict, Field

from gateway.rest.schemas.base import Body, JsonObject, Name, View
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
        default=None, description="Of a reply that is sent back. It is not read."
    )

    def to_domain(self) -> Message:
        """Convert to the domain value."""
        calls = tuple(call.to_domain() for call in self.tool_calls or ())
        return Message(
            self.role, self.content or "", calls, self.tool_call_id or "", self.name or ""
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


class FunctionView(View):
    """Function name and arguments of a tool call."""

    name: str
    arguments: str


class ToolCallView(View):
    """Tool call, as in the OpenAI API."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionView

    @classmethod
    def from_domain(cls, call: ToolCall) -> "ToolCallView":
        """Convert from the domain value."""
        return cls(id=call.id, function=FunctionView(name=call.name, arguments=call.arguments))


class AssistantMessageView(View):
    """Assistant message, as in the OpenAI API. `reasoning` is what the model said before it."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCallView] | None = None
    reasoning: str | None = None

    @classmethod
    def from_domain(cls, message: Message) -> "AssistantMessageView":
        """Convert from the domain value."""
        calls = [ToolCallView.from_domain(call) for call in message.tool_calls]
        return cls(
            content=message.content or (None if calls else ""),
            tool_calls=calls or None,
            reasoning=message.reasoning or None,
        )
