"""Earlier sessions and questions about them: with planted facts, or LoCoMo's."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from evals import harness
from evals.harness import Message, Setup
from evals.languages.base import Language
from evals.languages.choice import get_language
from evals.suites.ages import Ages, build_conversation
from evals.suites.locomo.answers import ask_briefly, f1, sample_evenly
from evals.suites.locomo.data import Question, read_conversation


@dataclass(frozen=True, eq=False)
class Asked:
    """A question about an earlier session.

    Attributes:
        text: What the user asks.
        session: Number of the session that has the answer, or the first part of it.
        expected: The answer.
        score: How good a reply is, 0 to 1.
    """

    text: str
    session: int
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
    homes = dict[int, int]()
    length = 0
    for exchange in harness.split_exchanges(messages[1:]):
        home = min(sessions - 1, length // tokens)
        for message in exchange:
            homes[len(homes)] = home
            parts[home].append(message)
        length += count(exchange)
    questions = [
        Asked(
            each.question,
            homes[each.place - 1],
            each.fact.value,
            partial(_score, language, each.fact.value),
        )
        for each in planted
    ]
    return Case(parts, questions)


def read_locomo(path: Path, questions: int, seed: int) -> Case:
    """Read a file's conversation, session by session, and so many of its questions. Raises BadDataFile."""
    conversation = read_conversation(path)
    system: Message = {
        "role": "system",
        "content": f"A conversation of {' and '.join(conversation.speakers)}.",
    }
    spoken = [(_session_of(each.lines), each) for each in conversation.spoken]
    # A session's date, said before its first line, has no line of its own.
    for index in reversed(range(len(spoken) - 1)):
        number, message = spoken[index]
        spoken[index] = (number or spoken[index + 1][0], message)
    groups = [list(group) for _, group in groupby(spoken, key=lambda each: each[0])]
    numbers = {group[0][0]: index for index, group in enumerate(groups)}
    drawn = list(conversation.questions)
    random.Random(f"earlier:{seed}:{path.name}").shuffle(drawn)
    return Case(
        [
            [system, *({"role": each.role, "content": each.content} for _, each in group)]
            for group in groups
        ],
        [_ask_locomo(each, numbers) for each in sample_evenly(drawn, questions)],
    )


def _ask_locomo(question: Question, numbers: dict[int, int]) -> Asked:
    first = min(question.evidence, key=lambda line: _session_of((line,)))
    home = numbers[_session_of((first,))]
    return Asked(ask_briefly(question), home, question.answer, partial(f1, question=question))


def _session_of(lines: Sequence[str]) -> int:
    """Number of the session of lines like `D8:6`; 0 for none."""
    return int(lines[0].removeprefix("D").partition(":")[0]) if lines else 0


def _score(language: Language, value: str, reply: str) -> float:
    return float(language.is_answer(reply, value))
