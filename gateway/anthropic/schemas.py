"""Request bodies of Anthropic's API, in what clients send of them.

Members that are not listed are ignored, as clients add their own. `null` is the same as absent.
What would change the answer and cannot be honoured is refused with its name.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from gateway.anthropic.blocks import Content, PlacedMessage, to_placed_messages
from gateway.openai.schemas import MAX_MESSAGES, Wire
from gateway.rest.schemas.base import JsonObject, Name
from gateway.rest.schemas.messages import ToolBody, ToolFunctionBody
from gateway.rest.schemas.sessions import CreateSessionBody
from kvrecall.domain.constraints import FREE, Constraint, ToolChoice
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.turn_request import TurnRequest

# Members that ask for what is not served here, with the values that ask for nothing.
_REFUSED: Mapping[str, tuple[object, ...]] = {
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
}
_CHOICES: Mapping[str, ToolChoice] = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.REQUIRED,
    "none": ToolChoice.NONE,
}
_EXAMPLE: JsonObject = {
    "model": "reference",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "Hello."}],
}


class MessageWire(Wire):
    """Message of a conversation; its content is text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Content


class ToolWire(Wire):
    """Tool that the client runs."""

    name: Name
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: JsonObject | None = None

    def to_body(self) -> ToolBody:
        """Convert to the tool that a session has, as OpenAI's API would name it."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return ToolBody(function=ToolFunctionBody.model_validate(function))


class ToolChoiceWire(Wire):
    """How the model should use the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def to_domain(self) -> Constraint:
        """Convert to a constraint on the answer. Raises InvalidRequest for a tool without a name."""
        if self.type == "tool" and self.name is None:
            raise InvalidRequest("tool_choice.name", "the tool that has to be called needs a name")
        tools = (self.name,) if self.type == "tool" and self.name is not None else ()
        single = bool(self.disable_parallel_tool_use or tools)
        return Constraint(tool_choice=_CHOICES[self.type], tools=tools, single_call=single)


class FormatWire(Wire):
    """Form of the answer's text."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfigWire(Wire):
    """How the answer is put out."""

    format: FormatWire | None = None


class ThreadWire(Wire):
    """Thread of a request: a new one, or that of an earlier message, of which it says what follows."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = Field(default=None, min_length=1, max_length=256)


class PromptBody(Wire):
    """Body of POST /v1/messages/count_tokens: a conversation, and the tools for it."""

    model_config = ConfigDict(
        extra="allow",
        frozen=True,
        allow_inf_nan=False,
        json_schema_extra={"examples": [_EXAMPLE]},
    )

    model: Name
    messages: list[MessageWire] = Field(
        max_length=MAX_MESSAGES, description="The conversation, or what follows in its thread."
    )
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolWire] | None = Field(default=None, max_length=128)
    tool_choice: ToolChoiceWire | None = None
    output_config: OutputConfigWire | None = None
    cache_control: JsonObject | None = None
    thread: ThreadWire | None = None

    @property
    def marks_cache(self) -> bool:
        """True if any block says that it should be cached. Everything is, so it has no effect."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for each in contents if isinstance(each, list) for block in each]
        marks = [block.get("cache_control") for block in blocks]
        marks += [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        return any(marks)

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        for name, nothing in _REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in nothing:
                raise InvalidRequest(name, f"{name} is not supported here; leave it out")
        if self.messages and self.messages[-1].role == "assistant":
            message = "the last message is the assistant's: answers cannot be begun by the client"
            raise InvalidRequest(f"messages[{len(self.messages) - 1}]", message)

    def messages_to_domain(self) -> list[PlacedMessage]:
        """Convert the messages, with their places. Raises InvalidRequest for other than text."""
        return list(self._place_messages())

    def tools_to_domain(self) -> list[ToolBody]:
        """Convert the tools."""
        return [tool.to_body() for tool in self.tools or ()]

    def _place_messages(self) -> Iterator[PlacedMessage]:
        if self.system:
            for placed in to_placed_messages("system", self.system, "system"):
                yield replace(placed, field="system")
        for index, message in enumerate(self.messages):
            yield from to_placed_messages(message.role, message.content, f"messages[{index}]")


class MessagesBody(PromptBody):
    """Body of POST /v1/messages: the conversation, and how to answer it."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=1)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    stop_sequences: (
        Annotated[
            list[Annotated[str, StringConstraints(min_length=1, max_length=256)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    kvrecall: CreateSessionBody = Field(
        default=CreateSessionBody(),
        description="Settings of the session that the conversation begins if none holds it; only "
        "one with the same settings is continued.",
    )

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        if self.kvrecall.tools:
            raise InvalidRequest("kvrecall.tools", "name the tools in the member tools")

    def settings_to_domain(self, tenant: str) -> CreateSession:
        """Convert to the settings of the session that the conversation would begin."""
        update = {"tools": self.tools_to_domain(), "model": None}
        return replace(self.kvrecall.model_copy(update=update).to_domain(), tenant=tenant)

    def turn_to_domain(self, limits: ServiceLimits) -> TurnRequest:
        """Convert to a turn without messages; more output than allowed is cut, not refused."""
        sampling = Sampling(
            max_tokens=min(self.max_tokens, limits.max_output_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=0.0 if self.top_p is None or self.top_p == 1 else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
            constraint=self._constraint_to_domain(),
        )
        return TurnRequest((), sampling=sampling)

    def _constraint_to_domain(self) -> Constraint:
        constraint = FREE if self.tool_choice is None else self.tool_choice.to_domain()
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return constraint
        return replace(constraint, schema=json.dumps(form.schema_), strict=True)
