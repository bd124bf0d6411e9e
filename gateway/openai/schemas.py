"""Request bodies of OpenAI's API, in what clients send of them: options, and chat completions."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from gateway.conversation.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ConversationBody,
    Wire,
    begin_answer,
)
from gateway.conversation.template_options import MAX_EFFORT, Wish, wish_effort
from gateway.openai.chat_calls import CallForm
from gateway.openai.chat_messages import MessageWire, convert_messages
from gateway.openai.chat_tools import (
    ChatToolBody,
    FunctionChoice,
    FunctionName,
    get_tool_place,
    name_functions,
    to_choice,
)
from gateway.openai.forms import FormOptions
from gateway.rest.schemas.answers import AnswerOptions
from gateway.rest.schemas.base import JsonObject, Length, Seed, Stops
from gateway.rest.schemas.messages import ToolBody, ToolFunctionBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Message, Sampling
from kvrecall.domain.turn_request import TurnRequest

MAX_CHOICES = 8
# Values of members that are not served otherwise: they ask for nothing beyond a plain answer.
_HONOURED: Mapping[str, Sequence[object]] = {
    "moderation": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
}
_HONOURED_IN_CHAT: Mapping[str, Sequence[object]] = {
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "truncate_prompt_tokens": (-1,),
}


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False,
        description="With `include_usage` every chunk has the counts so far.",
    )

    @property
    def counts_on(self) -> bool:
        """Whether every chunk has the counts so far."""
        return self.include_usage and self.continuous_usage_stats


class RequestOptions(FormOptions, AnswerOptions, ConversationBody):
    """What OpenAI's requests for an answer have in common."""

    honoured: ClassVar[Mapping[str, Sequence[object]]] = _HONOURED
    # The member that has the form of the answer's text.
    form_field: ClassVar[str] = "response_format"

    seed: Seed = None
    stop: Stops = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        default=None, max_length=128, description="Tokens that end the answer."
    )
    min_tokens: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Tokens of the answer before one that ends it may come.",
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on to the limit, or to a stop string."
    )

    @property
    @abstractmethod
    def text_form(self) -> JsonObject | None:
        """The form of the answer's text; None for free text."""

    @property
    @abstractmethod
    def reported_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each place; None: no log-probabilities."""

    @property
    def stop_strings(self) -> Sequence[str]:
        """The strings that end the answer."""
        return self.stop or ()

    def constrain_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling with the choice of tools, the form of the text and further options.

        Raises InvalidRequest.
        """
        if (self.min_tokens or 0) > sampling.max_tokens:
            message = (
                f"min_tokens {self.min_tokens} is over the limit of {sampling.max_tokens} tokens"
            )
            raise InvalidRequest("min_tokens", message)
        reported = replace(
            sampling,
            top_logprobs=self.reported_logprobs,
            min_tokens=sampling.max_tokens if self.ignore_eos else self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )
        constrained = self.constrain(reported, self.text_form, self.form_field)
        form = constrained.constraint
        held = self.hold_to_form(form, self.form_field if form.schema else "")
        return replace(constrained, constraint=held)

    def turn_to_domain(self, limits: ServiceLimits, default: Sampling) -> TurnRequest:
        """Convert to a turn without messages; more output than allowed is cut, not refused."""
        return replace(super().turn_to_domain(limits, default), seed=self.seed)


class ChatCompletionBody(RequestOptions):
    """Body of POST /v1/chat/completions: the whole conversation, and how to answer it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "reference", "messages": [{"role": "user", "content": "Hello."}]}
            ]
        },
    )
    honoured: ClassVar[Mapping[str, Sequence[object]]] = {
        **_HONOURED,
        **_HONOURED_IN_CHAT,
    }

    messages: list[MessageWire] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The whole conversation so far."
    )
    stream_options: StreamOptions | None = None
    n: int | None = Field(
        default=None,
        ge=1,
        le=MAX_CHOICES,
        description="Answers to give; each is computed in a session of its own.",
    )
    tools: list[ChatToolBody] | None = Field(default=None, max_length=MAX_TOOLS)
    functions: list[ToolFunctionBody] | None = Field(
        default=None,
        max_length=MAX_TOOLS,
        description="Tools as clients wrote them before there were others; the answer has one "
        "`function_call` at most.",
    )
    function_call: FunctionChoice = Field(
        default=None,
        description="The choice of `functions`.",
    )
    max_completion_tokens: Length = None
    max_tokens: Length = None
    response_format: JsonObject | None = Field(
        default=None, description="Form of the text: text, json_object or json_schema."
    )
    reasoning_effort: str | None = Field(
        default=None,
        max_length=MAX_EFFORT,
        description="How much the model reasons, where its chat template reads that; none: not at all.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="The last message is the beginning of the answer. What follows it is given back, "
        "and the session holds both as one message.",
    )
    add_generation_prompt: bool | None = None
    modalities: list[str] | None = None
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
        """The tools as a session has them. Raises InvalidRequest for one that is none."""
        if self.functions:
            return [ToolBody(type="function", function=each) for each in self.functions]
        return [tool.to_body(f"tools[{index}]") for index, tool in enumerate(self.tools or ())]

    @property
    def call_form(self) -> CallForm:
        """How the calls of the answers are written."""
        names = (tool.custom_name for tool in self.tools or ())
        return CallForm(frozenset(filter(None, names)), bool(self.functions))

    def get_place(self, field: str) -> str:
        """Return the place in this request of a field of the session's tools and of their choice."""
        if self.functions and field in ("tool_choice", "parallel_tool_calls"):
            return "function_call" if field == "tool_choice" else "functions"
        return get_tool_place(field, self.tools or ())

    def constrain_answer(self, sampling: Sampling) -> Sampling:
        """Return the sampling with the choice of tools, the form of the text and further options.

        Raises InvalidRequest.
        """
        changed: JsonObject = {"tool_choice": name_functions(self.tool_choice)}
        if self.functions:
            choice = to_choice(self.function_call)
            changed = {"tool_choice": choice, "parallel_tool_calls": False}
        chosen = self.model_copy(update=changed)
        return super(ChatCompletionBody, chosen).constrain_answer(sampling)

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        self._require_one_form_of_tools()
        if self.modalities is not None and "text" not in self.modalities:
            raise InvalidRequest("modalities", "answers are text: ask for text, alone or as well")
        if self.modalities not in (None, ["text"]):
            self.ignored.note("modalities")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options need stream: true")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs need logprobs: true")
        if self.add_generation_prompt is bool(self.continue_final_message):
            message = (
                "continue_final_message excludes it: leave it out"
                if self.add_generation_prompt
                else "an answer without a beginning needs it: leave it out"
            )
            raise InvalidRequest("add_generation_prompt", message)

    def _require_one_form_of_tools(self) -> None:
        if self.functions and (self.tools or self.tool_choice is not None):
            message = "functions and tools exclude each other; send tools and tool_choice"
            raise InvalidRequest("functions", message)
        if isinstance(self.function_call, FunctionName) and not self.functions:
            message = "a function is chosen of functions; send tools and tool_choice"
            raise InvalidRequest("function_call", message)

    def find_wishes(self) -> Iterator[Wish]:
        """Yield the wishes of the members for the chat template; the later ones win."""
        if self.reasoning_effort is not None:
            yield wish_effort("reasoning_effort", self.reasoning_effort)
        yield from super().find_wishes()

    def messages_to_domain(self, limits: ServiceLimits) -> tuple[Message, ...]:
        """Convert the messages, but for one that begins the answer.

        Raises InvalidRequest for a part that cannot be read.
        """
        tolerance = self.tolerate(limits)
        messages = self.messages[:-1] if self.continue_final_message else self.messages
        return tuple(convert_messages(messages, tolerance))

    def turn_to_domain(self, limits: ServiceLimits, default: Sampling) -> TurnRequest:
        """Convert to a turn without messages; more output than allowed is cut, not refused."""
        turn = super().turn_to_domain(limits, default)
        if not self.continue_final_message:
            return turn
        field = f"messages[{len(self.messages) - 1}]"
        return begin_answer(turn, self.messages[-1].to_domain(field, self.tolerate(limits)), field)
