"""Messages of a chat completion: calls of functions and custom tools, and the earlier `function_call`."""

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import Field

from gateway.conversation.bodies import MAX_TOOLS, CallId, Wire
from gateway.conversation.ignored import Tolerance
from gateway.openai.custom_tools import write_arguments
from gateway.openai.parts import Content, join_parts
from gateway.rest.schemas.base import Name
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import Message, ToolCall

ROLES = {"developer": "system", "function": "tool"}


class FunctionWire(Wire):
    """Name and arguments of a call."""

    name: Name
    arguments: str = "{}"

    def to_domain(self, id: str) -> ToolCall:
        """Convert to the domain value."""
        return ToolCall(id, self.name, self.arguments or "{}")


class CustomCallWire(Wire):
    """Name and text of a custom tool's call."""

    name: Name
    input: str

    def to_domain(self, id: str) -> ToolCall:
        """Convert to the domain value."""
        return ToolCall(id, self.name, write_arguments(self.input))


class ToolCallWire(Wire):
    """Tool call of an assistant message: of a function, or of a custom tool."""

    id: CallId
    type: Literal["function", "custom"] = "function"
    function: FunctionWire | None = None
    custom: CustomCallWire | None = None

    def to_domain(self, field: str) -> ToolCall:
        """Convert to the domain value. Raises InvalidRequest for a call without what is called."""
        called = self.function if self.type == "function" else self.custom
        if called is None:
            raise InvalidRequest(f"{field}.{self.type}", "Field required")
        return called.to_domain(self.id)


class MessageWire(Wire):
    """Message of a conversation; its content is text, null, or parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    tool_calls: list[ToolCallWire] | None = Field(default=None, max_length=MAX_TOOLS)
    function_call: FunctionWire | None = Field(
        default=None, description="Call as clients wrote it before there were several."
    )
    tool_call_id: CallId | None = None
    name: Name | None = None
    reasoning_content: str | None = Field(
        default=None, description="What an answer reasoned. The chat template may drop it."
    )
    reasoning: str | None = Field(default=None, description="As `reasoning_content`.")

    def to_domain(self, field: str, tolerance: Tolerance, asked: str = "") -> Message:
        """Convert to the domain value. Raises InvalidRequest for a part that cannot be read.

        `asked`: the id of the `function_call` of this message, or of that which it answers.
        """
        calls = tuple(
            call.to_domain(f"{field}.tool_calls[{index}]")
            for index, call in enumerate(self.tool_calls or ())
        )
        if self.function_call is not None:
            calls += (self.function_call.to_domain(asked),)
        answers = asked if self.role == "function" else ""
        return Message(
            ROLES.get(self.role, self.role),
            join_parts(self.content, f"{field}.content", tolerance),
            calls,
            self.tool_call_id or answers,
            (self.name or "") if self.role in ("user", "function") else "",
            self._get_reasoning(),
        )

    def _get_reasoning(self) -> str:
        """Return the reasoning of an answer, by either of its names."""
        given = self.reasoning_content or self.reasoning
        return given if given and self.role == "assistant" else ""


def convert_messages(messages: Iterable[MessageWire], tolerance: Tolerance) -> Iterator[Message]:
    """Convert messages with their places. Raises InvalidRequest for a part that cannot be read.

    A `function_call` has no id: it gets one, and so does the message of role `function` behind it.
    """
    asked = ""
    for index, message in enumerate(messages):
        if message.role == "assistant":
            asked = "" if message.function_call is None else f"function_call_{index}"
        yield message.to_domain(f"messages[{index}]", tolerance, asked)
