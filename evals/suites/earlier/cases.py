"""Earlier sessions and questions about them: with planted facts, or LoCoMo's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from evals import harness
from evals.harness import Message, Setup
from evals.languages.base import Language
from evals.languages.choice import get_language
from evals.suites.ages import Ages, build_conversation
from evals.suites.locomo.answers import ask_briefly, describe, f1, sample_evenly
from evals.suites.locomo.data import read_conversation


@dataclass(frozen=True, eq=False)
class Asked:
    """A question about earlier sessions.

    Attributes:
        text: What the user asks.
        expected: The answer.
        score: How good a reply is, 0 to 1.
    """

    text: str
    expected: str
    score: Callable[[str], float]


@dataclass(frozen=True, eq=False)
class Case:
    """Earlier sessions, the oldest first, each with a system message, and what is asked after them."""

    sessions: Sequence[Sequence[Message]]
    questions: Sequence[Asked]

    @property
    def system(self) -> Message:
        """The system message of the first session, which the new one has as well."""
        return self.sessions[0][0]

    @property
    def exchanges(self) -> list[list[Message]]:
        """What was said in all sessions, by exchanges."""
        return [each for said in self.sessions for each in harness.split_exchanges(said[1:])]


def plant_facts(setup: Setup, sessions: int, tokens: int, facts: int) -> Case:
    """Plant so many facts in all, at even places, in sessions of about `tokens` tokens each."""
    loaded = harness.load(setup.model)
    count = partial(harness.count_tokens, loaded.tokenizer)
    language = get_language(setup.model, ())
    unit = Ages(setup, sessions * tokens, facts)
    messages, planted = build_conversation(unit, language, count, loaded.model.max_context)
    parts: list[list[Message]] = [[messages[0]] for _ in range(sessions)]
    length = 0
    for exchange in harness.split_exchanges(messages[1:]):
        parts[min(sessions - 1, length // tokens)] += exchange
        length += count(exchange)
    return Case(
        parts,
        [
            Asked(each.question, each.fact.value, partial(_score, language, each.fact.value))
            for each in planted
        ],
    )


def read_locomo(paths: Sequence[Path], questions: int) -> Case:
    """Read the files' conversations, one after the other, session by session, and so many of each one's questions.

    Raises BadDataFile.
    """
    conversations = [read_conversation(path) for path in paths]
    return Case(
        [
            [describe(each), *({"role": said.role, "content": said.content} for said in session)]
            for each in conversations
            for session in each.sessions
        ],
        [
            Asked(ask_briefly(asked), asked.answer, partial(f1, question=asked))
            for each in conversations
            for asked in sample_evenly(each.questions, questions)
        ],
    )


def _score(language: Language, value: str, reply: str) -> float:
    return float(language.is_answer(reply, value))
