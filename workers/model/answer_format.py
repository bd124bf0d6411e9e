"""A family's form of answers."""

from dataclasses import dataclass

from workers.model.calls.grammar import CallGrammar
from workers.model.calls.ids import CallIds
from workers.model.calls.sink import Reader


@dataclass(frozen=True)
class Channels:
    """How an answer is written that is several messages, each on a channel (gpt-oss' harmony).

    - `reasoning`: texts around a message that reasons, up to where the next message begins.
    - `text`: what the answer's text begins with; `call`: what comes before the mark of a call.
    - `end`: the end of a message; `last`: what a model writes instead at the end of its answer, and
      is kept as `end`.
    """

    reasoning: tuple[str, str]
    text: str
    call: str
    end: str
    last: str


@dataclass(frozen=True)
class AnswerFormat:
    """A family's form of answers.

    - `mark`: the text that opens a call; empty if calls are not known.
    - `read`: reads the calls that a mark opens, up to the end of their text.
    - `grammar`: of the text behind the mark; None if it is not known.
    - `bare`: characters that calls may begin with at the beginning of an answer, without a mark.
    - `reasoning`: the texts around an answer's reasoning, at its beginning; None without.
    - `channels`: an answer is several messages; None: one.
    - `inner_marks`: other texts that may be tokens of their own.
    - `call_ids`: the form of ids of calls that the chat template takes.
    """

    name: str
    mark: str = ""
    read: Reader | None = None
    grammar: CallGrammar | None = None
    bare: str = ""
    reasoning: tuple[str, str] | None = None
    channels: Channels | None = None
    inner_marks: tuple[str, ...] = ()
    call_ids: CallIds = CallIds.ANY

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that an answer's parts are told by."""
        outer = (self.mark, *(self.reasoning or ()))
        return (*(text for text in outer if text), *self.inner_marks)
