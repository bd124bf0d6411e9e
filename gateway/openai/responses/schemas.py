"""The request body of responses, in what clients send of it."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints

from gateway.conversation.bodies import MAX_MESSAGES, MAX_TOOLS, Wire
from gateway.conversation.template_options import MAX_EFFORT, Wish, wish_effort
from gateway.openai.responses.tools import Toolbox, read_tools
from gateway.openai.schemas import RequestOptions
from gateway.rest.schemas.base import Length, Name
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Message, Sampling
from services.conversations.continuation import Direction

Json = dict[str, Any]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
_HONOURED: Mapping[str, Sequence[object]] = {"prompt": (), "generate": (True,)}
_LOGPROBS = "message.output_text.logprobs"


class ConversationName(Wire):
    """A conversation by its id."""

    id: Name


class TextOptions(Wire):
    """Form of the answer's text."""

    format: Json | None = None
    verbosity: str | None = None


class ReasoningOptions(Wire):
    """Wishes on reasoning, given back. `summary` has no effect."""

    effort: str | None = Field(default=None, max_length=MAX_EFFORT)
    summary: str | None = None


class ResponseStreamOptions(Wire):
    """Options of a stream."""

    include_obfuscation: bool = False


class CacheOptions(Wire):
    """Wishes on OpenAI's prompt cache. They have no effect: sessions hold what was said."""

    prewarm: bool = False


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
    )
    tools: Annotated[list[Json], Field(max_length=MAX_TOOLS)] | None = None
    max_output_tokens: Length = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """The most tokens that the answer may have; None: the service's default."""
        return self.max_output_tokens

    @property
    def placed_tools(self) -> list[tuple[str, Json]]:
        """The tools with their places: the request's own, and those that items of the input bring."""
        places = [("tools", self.tools or ())]
        for index, item in self._find_items("additional_tools", "tool_search_output"):
            tools = item.get("tools")
            if isinstance(tools, list):
                places.append((f"input[{index}].tools", tools))
        return [
            (f"{field}[{index}]", tool)
            for field, tools in places
            for index, tool in enumerate(tools)
            if isinstance(tool, dict)
        ]

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools that the model is offered. Raises InvalidRequest for a bad one."""
        return read_tools(self.placed_tools)

    @property
    def session_tools(self) -> list[ToolBody]:
        """The tools as a session has them. Raises InvalidRequest for a bad one."""
        return self.toolbox.bodies

    @property
    def text_form(self) -> Json | None:
        """The form of the answer's text; None for free text."""
        if self.text is not None and self.text.format is not None:
            return self.text.format
        updates = [item.get("text") for _, item in self._find_items("configuration_update")]
        forms = [update.get("format") for update in updates if isinstance(update, dict)]
        return next((form for form in reversed(forms) if isinstance(form, dict)), None)

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

    def find_wishes(self) -> Iterator[Wish]:
        """Yield the wishes of the members for the chat template; the later ones win."""
        if self.reasoning is not None and self.reasoning.effort is not None:
            yield wish_effort("reasoning.effort", self.reasoning.effort)
        yield from super().find_wishes()

    def constrain_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling with the choice of tools, the form of the text and further options.

        Raises InvalidRequest.
        """
        choice, _ = self.toolbox.choose(self.tool_choice)
        chosen = self.model_copy(update={"tool_choice": choice})
        return super(ResponseBody, chosen).constrain_answer(sampling)

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        for each in (*self.toolbox.left_out, *self.toolbox.choose(self.tool_choice)[1]):
            self.ignored.note(each.field, each.what)
        if self.truncation == "auto":
            self.ignored.note("truncation", "auto")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            self.ignored.note("stream_options.include_obfuscation")
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            field = "prompt_cache_options.prewarm"
            message = f"{field} is not supported here; leave it out"
            raise InvalidRequest(field, message, openai_code="unsupported_parameter")
        if self.previous_response_id is not None and self.conversation is not None:
            message = "previous_response_id and conversation exclude each other"
            raise InvalidRequest("previous_response_id", message)
        if self.background and self.store is False:
            message = "a response in the background is read by its id: it has to be stored"
            raise InvalidRequest("background", message)

    def _find_items(self, *kinds: str) -> Iterator[tuple[int, Json]]:
        """Yield the items of the input of these types, with their numbers."""
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if item.get("type") in kinds:
                yield index, item
