"""A conversation of the demo: recorded exchanges, and questions that the model answers itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reference import conversation as reference

# The reference model's replies are one sentence, or a tool call in JSON.
_REFERENCE_REPLY_TOKENS = 48


def _accept(reply: str) -> bool:
    """Accept any reply: of an exchange that asks nothing."""
    return True


@dataclass(frozen=True)
class RecordedCall:
    """A tool call that was recorded, its result, and what the user asks after it."""

    name: str
    arguments: str
    result: str
    question: str


@dataclass(frozen=True)
class Exchange:
    """A message of the user and the reply to it: recorded, or of a question the model's.

    `fact` is the index of the exchange that states what is asked; None: nothing is. `reply` is then
    the expected one, and `is_right` judges the model's. A tool is called by the model itself if
    there is a `tool_result`, and was if there is a `recorded_call`.
    """

    user: str
    reply: str
    fact: int | None = None
    is_right: Callable[[str], bool] = _accept
    tool_result: str | None = None
    recorded_call: RecordedCall | None = None

    @property
    def needs_tool(self) -> bool:
        """True if the question is answered after a tool's result."""
        return self.tool_result is not None or self.recorded_call is not None

    @property
    def question(self) -> str:
        """The message that the model answers."""
        return self.user if self.recorded_call is None else self.recorded_call.question


@dataclass(frozen=True)
class Conversation:
    """Exchanges, and the settings of the session that holds them; `reply_tokens` bounds a reply."""

    seed: int
    system: str
    tools: Sequence[Mapping[str, Any]]
    exchanges: tuple[Exchange, ...]
    reply_tokens: int


def generate_reference(seed: int, tokens: int) -> Conversation:
    """A conversation in the reference model's language, with held-out names and values."""
    generated = reference.generate(seed, tokens, split="held_out")
    exchanges = tuple(
        Exchange(each.user, each.reply, each.fact_exchange, each.is_answered_by, each.tool_result)
        for each in generated.exchanges
    )
    return Conversation(seed, generated.system, generated.tools, exchanges, _REFERENCE_REPLY_TOKENS)
