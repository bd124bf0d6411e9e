"""Request bodies of Anthropic's API, in what clients send of them."""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import ConfigDict, Field

from gateway.anthropic.blocks import Content, PlacedMessage, to_placed_messages
from gateway.anthropic.tools import ToolWire
from gateway.conversation.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ConversationBody,
    ModelRequest,
    Wire,
)
from gateway.conversation.ignored import Tolerance
from gateway.conversation.template_options import (
    MAX_EFFORT,
    TemplateOptions,
    Wish,
    wish_effort,
)
from gateway.rest.schemas.base import JsonObject, Name, StopStrings
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.answer.constraints import FREE, Constraint, ToolChoice
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Sampling
from kvrecall.domain.sessions.request import CreateSession

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
    effort: str | None = Field(default=None, max_length=MAX_EFFORT)


class ThreadWire(Wire):
    """Thread of a request: a new one, or that of an earlier message, of which it says what follows."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = Field(default=None, min_length=1, max_length=256)


class PromptBody(TemplateOptions, ModelRequest):
    """Body of POST /v1/messages/count_tokens: a conversation, and the tools for it."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})
    messages: list[MessageWire] = Field(
        max_length=MAX_MESSAGES, description="The conversation, or what follows in its thread."
    )
    system: str | list[dict[str, Any]] | None = None
    tools: list[ToolWire] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceWire | None = None
    output_config: OutputConfigWire | None = None
    output_format: FormatWire | None = Field(
        default=None, description="The older place of `output_config.format`."
    )
    cache_control: JsonObject | None = None
    thread: ThreadWire | None = None

    @property
    def goes_on(self) -> bool:
        """True if the request says what follows in a thread, which keeps what it was created with."""
        return self.thread is not None and self.thread.type == "continue"

    @property
    def marks_cache(self) -> bool:
        """True if any block says that it should be cached. Everything is, so it has no effect."""
        contents = [self.system, *(message.content for message in self.messages)]
        blocks = [block for each in contents if isinstance(each, list) for block in each]
        marks = [block.get("cache_control") for block in blocks]
        marks += [self.cache_control, *(tool.cache_control for tool in self.tools or ())]
        return any(marks)

    def find_wishes(self) -> Iterator[Wish]:
        """Yield the wishes of the members for the chat template; the later ones win."""
        if self.output_config is not None and self.output_config.effort is not None:
            yield wish_effort("output_config.effort", self.output_config.effort, switches=False)
        yield from super().find_wishes()

    def messages_to_domain(self, limits: ServiceLimits) -> list[PlacedMessage]:
        """Convert the messages, with their places.

        Raises InvalidRequest for a block that cannot be read.
        """
        return list(self._place_messages(self.tolerate(limits)))

    @property
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them."""
        bodies = (
            tool.to_body(f"tools[{index}]", self.ignored)
            for index, tool in enumerate(self.tools or ())
        )
        return [body for body in bodies if body is not None]

    def _place_messages(self, tolerance: Tolerance) -> Iterator[PlacedMessage]:
        if self.system:
            for placed in to_placed_messages("system", self.system, "system", tolerance):
                yield replace(placed, field="system")
        for index, message in enumerate(self.messages):
            field = f"messages[{index}]"
            yield from to_placed_messages(message.role, message.content, field, tolerance)


class MessagesBody(PromptBody, ConversationBody):
    """Body of POST /v1/messages: the conversation, and how to answer it."""

    max_tokens: int = Field(ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=1)
    stop_sequences: StopStrings | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have."""
        return self.max_tokens

    @property
    def stop_strings(self) -> Sequence[str]:
        """The strings that end the answer."""
        return self.stop_sequences or ()

    def settings_to_domain(self, tenant: str, variables: Container[str]) -> CreateSession:
        """Convert to the settings of the session that the conversation would begin."""
        return super().settings_to_domain(tenant, () if self.goes_on else variables)

    def constrain_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling with the choice of tools and the form of the text.

        Raises InvalidRequest.
        """
        constraint = FREE if self.tool_choice is None else self.tool_choice.to_domain()
        form = self.output_format
        if self.output_config is not None:
            form = self.output_config.format or form
        if form is not None:
            constraint = replace(constraint, schema=json.dumps(form.schema_), strict=True)
        return replace(sampling, constraint=constraint)
