"""The request body of responses, in what clients send of it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, ValidationError

from gateway.conversation_bodies import MAX_MESSAGES, Wire
from gateway.openai.schemas import RequestOptions
from gateway.rest.schemas.base import Length, Name
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Message
from services.conversations.directed import Direction

Json = dict[str, Any]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
_HONOURED: Mapping[str, Sequence[object]] = {
    "prompt": (),
    "context_management": (),
}
_LOGPROBS = "message.output_text.logprobs"


class ConversationName(Wire):
    """A conversation by its id."""

    id: Name


class TextOptions(Wire):
    """Form of the answer's text."""

    format: Json | None = None
    verbosity: str | None = None


class ReasoningOptions(Wire):
    """Wishes on reasoning, given back."""

    effort: str | None = None
    summary: str | None = None


class ResponseBody(RequestOptions):
    """Body of POST /v1/responses: what is new in a conversation, and how to answer it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "reference", "input": "Hello."}]}
    )
    honoured: ClassVar[Mapping[str, Sequence[object]]] = {
        **RequestOptions.honoured,
        **_HONOURED,
    }
    form_field: ClassVar[str] = "text.format"

    input: str | Annotated[list[Json], Field(max_length=MAX_MESSAGES)] | None = Field(
        default=None, description="Text of a user, or items: messages, calls, results."
    )
    instructions: str | None = Field(
        default=None, description="System message of this answer; not carried over to the next."
    )
    previous_response_id: Name | None = Field(
        default=None, description="Response whose conversation the input goes on with."
    )
    conversation: Name | ConversationName | None = Field(
        default=None,
        description="Conversation whose items come before the input; it gets the input and the "
        "answer.",
    )
    store: bool | None = None
    background: bool | None = Field(
        default=None,
        description="Answer at once, and compute the response, to be read by its id.",
        exclude_if=lambda value: value is None,
    )
    tools: Annotated[list[Json], Field(max_length=128)] | None = None
    max_output_tokens: Length = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the service's default."""
        return self.max_output_tokens

    @property
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them. Raises InvalidRequest for a hosted or a bad one."""
        return [_to_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]

    @property
    def text_form(self) -> Json | None:
        """The form of the answer's text; None for free text."""
        return None if self.text is None else self.text.format

    @property
    def reported_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each place; None: no log-probabilities."""
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the conversation's first item."""
        return (Message("system", self.instructions),) if self.instructions else ()

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation."""
        if isinstance(self.conversation, ConversationName):
            return self.conversation.id
        return self.conversation

    @property
    def direction(self) -> Direction:
        """Where the conversation goes on. Raises InvalidRequest for what a response cannot do."""
        direction = self.kvrecall.direction
        if direction.session:
            message = "a response says by previous_response_id or conversation what it follows"
            raise InvalidRequest("kvrecall.session", message)
        if direction.alone and self.store is not False:
            message = "a response of which nothing is kept needs store: false"
            raise InvalidRequest("store", message)
        if direction.alone and (self.previous_response_id or self.conversation):
            field = "conversation" if self.conversation else "previous_response_id"
            raise InvalidRequest(field, "a response of which nothing is kept follows no other")
        return direction

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        if self.previous_response_id is not None and self.conversation is not None:
            message = "previous_response_id and conversation exclude each other"
            raise InvalidRequest("previous_response_id", message)
        if self.background and self.store is False:
            message = "a response in the background is read by its id: it has to be stored"
            raise InvalidRequest("background", message)


def _to_tool(tool: Json, field: str) -> ToolBody:
    """Nest a flat tool, as chat completions have it."""
    if (tool.get("type") or "function") != "function":
        message = f"tools of type {tool['type']!r} are not served here; only functions are"
        raise InvalidRequest(f"{field}.type", message, openai_code="unsupported_tool")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    try:
        return ToolBody.model_validate({"type": "function", "function": function})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"][1:])
        raise InvalidRequest(f"{field}.{path}", first["msg"]) from error
