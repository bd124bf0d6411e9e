"""Request bodies of OpenAI's API, in what clients send of them: options, and chat completions.

Members that are not listed are ignored, as clients add their own. `null` is the same as absent.
What would change the answer and cannot be honoured is refused with its name.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from gateway.rest.schemas.answers import AnswerOptions
from gateway.rest.schemas.base import MAX_SEED, JsonObject, Name
from gateway.rest.schemas.messages import ToolBody
from gateway.rest.schemas.sessions import CreateSessionBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Message, Sampling, ToolCall
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.turn_request import TurnRequest

MAX_MESSAGES = 4096
ROLES = {"developer": "system"}
_TEXT_PARTS = {
    "text": "text",
    "refusal": "refusal",
    "input_text": "text",
    "output_text": "text",
}
# Values of members that are not served otherwise: they ask for nothing beyond a plain answer.
_HONOURED: Mapping[str, tuple[object, ...]] = {"moderation": ()}
_HONOURED_IN_CHAT: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "functions": (),
    "function_call": (),
}


class Wire(BaseModel):
    """A part of a request: unknown members are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class FunctionWire(Wire):
    """Name and arguments of a call."""

    name: Name
    arguments: str = "{}"


class ToolCallWire(Wire):
    """Tool call of an assistant message."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionWire


class MessageWire(Wire):
    """Message of a conversation; its content is text, null, or parts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[ToolCallWire] | None = Field(default=None, max_length=128)
    tool_call_id: Name | None = None
    name: Name | None = None

    def to_domain(self, field: str) -> Message:
        """Convert to the domain value. Raises InvalidRequest for a part that is no text."""
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments or "{}")
            for call in self.tool_calls or ()
        )
        return Message(
            ROLES.get(self.role, self.role),
            join_parts(self.content, f"{field}.content"),
            calls,
            self.tool_call_id or "",
            (self.name or "") if self.role == "user" else "",
        )


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = False


class RequestOptions(AnswerOptions, Wire):
    """What requests for an answer have in common, whatever their API: model, sampling, session."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    # The values of unlisted members that ask for nothing beyond a plain answer.
    honoured: ClassVar[Mapping[str, tuple[object, ...]]] = _HONOURED
    # The member that has the form of the answer's text.
    form_field: ClassVar[str] = "response_format"

    model: Name
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: (
        str
        | Annotated[
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

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the service's default."""
        raise NotImplementedError

    @property
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them."""
        raise NotImplementedError

    @property
    def text_form(self) -> JsonObject | None:
        """The form of the answer's text; None for free text."""
        return None

    @property
    def reported_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each place; None: no log-probabilities."""
        return None

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        for name, honoured in self.honoured.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in honoured:
                message = f"{name} {json.dumps(value)[:100]} is not supported here; leave it out"
                raise InvalidRequest(name, message, openai_code="unsupported_parameter")
        if self.kvrecall.tools:
            raise InvalidRequest("kvrecall.tools", "name the tools in the member tools")

    def settings_to_domain(self, tenant: str) -> CreateSession:
        """Convert to the settings of the session that the conversation would begin."""
        body = self.kvrecall.model_copy(update={"tools": self.session_tools, "model": None})
        return replace(body.to_domain(), tenant=tenant)

    def turn_to_domain(self, limits: ServiceLimits) -> TurnRequest:
        """Convert to a turn without messages; more output than allowed is cut, not refused."""
        wanted = self.wanted_tokens or limits.default_max_tokens
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling = Sampling(
            max_tokens=min(wanted, limits.max_output_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=0.0 if self.top_p is None or self.top_p == 1 else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(each for each in stop if each),
            top_logprobs=self.reported_logprobs,
        )
        constrained = self.constrain(sampling, self.text_form, self.form_field)
        return TurnRequest((), sampling=constrained, seed=self.seed)


class ChatCompletionBody(RequestOptions):
    """Body of POST /v1/chat/completions: the whole conversation, and how to answer it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "reference", "messages": [{"role": "user", "content": "Hello."}]}
            ]
        },
    )
    honoured: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **_HONOURED,
        **_HONOURED_IN_CHAT,
    }

    messages: list[MessageWire] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The whole conversation so far."
    )
    stream_options: StreamOptions | None = None
    tools: list[ToolBody] | None = Field(default=None, max_length=128)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    response_format: JsonObject | None = Field(
        default=None, description="Form of the text: text, json_object or json_schema."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def text_form(self) -> JsonObject | None:
        """The form of the answer's text; None for free text."""
        return self.response_format

    @property
    def reported_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each place; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the service's default."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them."""
        return self.tools or []

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options need stream: true")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs need logprobs: true")

    def messages_to_domain(self) -> tuple[Message, ...]:
        """Convert the messages. Raises InvalidRequest for a part that is no text."""
        return tuple(
            message.to_domain(f"messages[{index}]") for index, message in enumerate(self.messages)
        )


def join_parts(content: str | list[dict[str, Any]] | None, field: str) -> str:
    """Return the text of a content in parts. Raises InvalidRequest for an image, audio or a file."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.get(_TEXT_PARTS.get(str(part.get("type")), ""))
        if not isinstance(text, str):
            message = f"parts of type {part.get('type')!r} are not supported; send text"
            raise InvalidRequest(f"{field}[{index}]", message, openai_code="unsupported_content")
        texts.append(text)
    return "".join(texts)
