"""Messages, tool calls and sampling parameters."""

import json
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, Self

from kvrecall.domain.answer.constraints import FREE, Constraint

Role = Literal["system", "user", "assistant", "tool"]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text stands for; None if it is no JSON, or no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant asks for; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str

    @property
    def signal(self) -> str:
        """The text an early repair is conditioned on."""
        return f"{self.name} {self.arguments}"


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    `reasoning`: what the model said before the content of an answer. Chat templates read that of
    some answers.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""

    @property
    def size(self) -> int:
        """Bytes of everything in the message that reaches the model."""
        calls = sum(len((call.name + call.arguments).encode()) for call in self.tool_calls)
        return len(self.content.encode()) + len(self.reasoning.encode()) + calls


MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: their logits would leave the range of numbers."""


MAX_TOP_LOGPROBS = 20
_OFF = MappingProxyType({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0})


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one turn. top_p 1, top_k 0, min_p 0 and the default penalties are off.

    A temperature under `MIN_TEMPERATURE` is greedy.

    - `frequency_penalty`, `presence_penalty`: taken off the logit of a token of the turn's own
      answer, for each time it was generated, and once.
    - `repetition_penalty`: divisor of such a token's logit, or factor of a negative one.
    - `min_p`: least probability of a token to sample, as a share of the likeliest one's.
    - `logit_bias`: token ids, and what is added to their logits.
    - `top_logprobs`: the number of likeliest tokens to report at each place; None: none at all, not
      even the generated one's.
    - `min_tokens`: tokens of the answer before one that ends it may come. A stop string ends it at
      any place, and so does a grammar that allows nothing else.
    - `stop_token_ids`: tokens that end the answer, beside the model's own.
    - `prompt_logprobs`: as `top_logprobs`, for the tokens of the prompt.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None
    constraint: Constraint = FREE
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    def with_named(self, **values: Any) -> Self:
        """Return the sampling with the values that are not None: those that a request names.

        With a temperature that is greedy the likeliest tokens are asked for: defaults are off.
        """
        named = {name: each for name, each in values.items() if each is not None}
        greedy = named.get("temperature", MIN_TEMPERATURE) < MIN_TEMPERATURE
        return replace(self, **({**_OFF, **named} if greedy else named))


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, and those of the likeliest ones in its place.

    That of a prompt's first token is NaN, since nothing comes before it. They are the model's: before
    temperature, penalties, bias and constraint.
    """

    token: str
    utf8: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()
