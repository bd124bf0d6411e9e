"""The request body of completions, in what clients send of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from gateway.openai.schemas import MAX_CHOICES, RequestOptions, StreamOptions
from gateway.rest.schemas.base import JsonObject
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import MAX_TOP_LOGPROBS, Sampling
from kvrecall.domain.turn_request import TurnRequest
from services.conversations.continuation import Direction

# Answers to one request: prompts, times the answers to each.
MAX_COMPLETIONS = 128
DEFAULT_TOKENS = 16
NO_LIMIT = -1
_MAX_TOKEN = 2**32

# One prompt: a text, or token ids.
Prompt = str | tuple[int, ...]


class CompletionBody(RequestOptions):
    """Body of POST /v1/completions: prompts as they are, without a chat template."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "reference", "prompt": "Once upon a time"}]}
    )
    honoured: ClassVar[Mapping[str, Sequence[object]]] = {
        **RequestOptions.honoured,
        "prompt_embeds": (),
        "suffix": ("",),
    }

    prompt: str | list[Any] = Field(
        description="A text, texts, token ids, or lists of token ids. A text gets the special tokens "
        "that the tokenizer puts around one."
    )
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    best_of: int | None = Field(default=None, ge=1, description="The same as n.")
    max_tokens: int | None = Field(
        default=None,
        ge=NO_LIMIT,
        lt=2**31,
        description=f"Null: {DEFAULT_TOKENS}; {NO_LIMIT}: as many as the service allows; 0 with echo: "
        "the prompt alone.",
    )
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log-probabilities of the tokens, and of so many others in each place.",
    )
    echo: bool | None = Field(default=None, description="Begin the text with the prompt.")
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=NO_LIMIT, description="Keep so many of each prompt's last tokens."
    )
    stream_options: StreamOptions | None = None
    response_format: JsonObject | None = None

    @property
    def text_form(self) -> JsonObject | None:
        """The form of the answer's text; None for free text."""
        return self.response_format

    @property
    def reported_logprobs(self) -> int | None:
        """The number of likeliest tokens to report at each place; None: no log-probabilities."""
        return self.logprobs

    @property
    def session_tools(self) -> list[ToolBody]:
        """No tools."""
        return []

    @property
    def wanted_tokens(self) -> int:
        """The most tokens that an answer may have; at least 1."""
        if self.max_tokens is None:
            return DEFAULT_TOKENS
        return 2**31 if self.max_tokens == NO_LIMIT else max(1, self.max_tokens)

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    def read_prompts(self) -> list[Prompt]:
        """Return the prompts. Raises InvalidRequest for what is none, and for too many."""
        if isinstance(self.prompt, str):
            prompts: list[Prompt] = [self.prompt]
        elif all(isinstance(each, str) for each in self.prompt):
            prompts = list(self.prompt)
        elif all(_is_token(each) for each in self.prompt):
            prompts = [tuple(self.prompt)]
        elif all(isinstance(each, list) and all(map(_is_token, each)) for each in self.prompt):
            prompts = [tuple(each) for each in self.prompt]
        else:
            message = (
                "a prompt is a text, a list of texts, token ids, or a list of lists of token ids"
            )
            raise InvalidRequest("prompt", message)
        if not prompts:
            raise InvalidRequest("prompt", "there is no prompt in the list; send at least one")
        if len(prompts) * self.choices > MAX_COMPLETIONS:
            message = (
                f"{len(prompts)} prompts with {self.choices} answers each are over the limit of "
                f"{MAX_COMPLETIONS} answers; send them in several requests"
            )
            raise InvalidRequest("prompt", message)
        return prompts

    def require_honoured(self) -> None:
        """Raise InvalidRequest for a member that would change the answer and cannot be honoured."""
        super().require_honoured()
        if self.best_of is not None and self.best_of != self.choices:
            message = f"best_of {self.best_of} is not supported here: it has to be n, or left out"
            raise InvalidRequest("best_of", message, openai_code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options need stream: true")
        if self.stream and self.echo and self.logprobs is not None:
            message = "the prompt's log-probabilities come with a whole answer: leave stream out"
            raise InvalidRequest("stream", message, openai_code="unsupported_parameter")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "a completion calls no tools; leave it out")
        direction = self.kvrecall.direction
        if direction not in (Direction(), Direction(alone=True)):
            message = "a completion is in a session of its own; leave it out"
            raise InvalidRequest("kvrecall.session", message)

    def turn_to_domain(self, limits: ServiceLimits, default: Sampling) -> TurnRequest:
        """Convert to a turn without its prompt."""
        turn = super().turn_to_domain(limits, default)
        assert turn.sampling is not None
        scored = self.logprobs if self.echo else None
        sampling = replace(turn.sampling, prompt_logprobs=scored)
        return replace(turn, sampling=sampling, generate=self.max_tokens != 0)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TOKEN
