"""Conversations about several topics that come and go, with facts in each: what `longconv` asks about.

The language is the reference model's; seeds, names and values are of its held-out split. A fact is said among small
talk about its topic, and asked for when the conversation has come back to that topic: the topic, not the person's
name, is what the question shares with the place where its answer was said.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reference.chat import REPLY_LINES, TOPICS, USER_LINES, line, small_talk
from reference.conversation import (
    CLAUSE,
    MOST_FACTS,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    gives,
    sentence,
)
from reference.words import ATTRIBUTES, first_piece, names_for, value_for

Place = Literal["early", "middle", "late"]

_TOKENS_OF_CHAT = 38
_TOKENS_OF_FACT = 40
_VISITS = 2


@dataclass(frozen=True)
class Question:
    """One question, asked after the whole conversation. `place`: the third of the conversation that answers it.

    `lead`: a line on the topic and the assistant's reply to it, said before the question in the same turn.
    """

    lead: tuple[str, str]
    text: str
    answer: str
    topic: str
    place: Place

    def messages(self) -> list[dict[str, Any]]:
        """The turn that asks it, as OpenAI-style messages."""
        user, reply = self.lead
        return [
            {"role": "user", "content": user},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": self.text},
        ]

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply ends in exactly the value asked for."""
        return gives(reply, self.answer)


@dataclass(frozen=True)
class TopicConversation:
    """A conversation of user and assistant, the topic of each exchange, and its questions."""

    seed: int
    system: str
    exchanges: tuple[tuple[str, str], ...]
    topics: tuple[str, ...]
    questions: tuple[Question, ...]

    def messages(self) -> list[dict[str, Any]]:
        """As OpenAI-style messages, the system's first."""
        said = [{"role": "system", "content": self.system}]
        for user, reply in self.exchanges:
            said += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        return said


@dataclass(frozen=True)
class _Fact:
    name: str
    attribute: str
    value: str
    topic: str
    exchange: int


def generate_topics(
    seed: int, n_tokens: int, n_topics: int = 8, n_questions: int = 32
) -> TopicConversation:
    """A conversation of about `n_tokens` tokens on `n_topics` topics, each visited twice, a fact a question.

    The same arguments give the same conversation. Raises ValueError where the language has no room for so many
    facts (42) or topics (12).
    """
    if n_questions > MOST_FACTS or n_topics > len(TOPICS):
        raise ValueError(
            f"at most {MOST_FACTS} questions and {len(TOPICS)} topics; {n_questions}, {n_topics} asked"
        )
    rng = random.Random(f"topics:{seed}")
    topics = rng.sample(sorted(TOPICS), n_topics)
    chats = max(0, round((n_tokens - n_questions * _TOKENS_OF_FACT) / _TOKENS_OF_CHAT))
    plan = _plan(rng, topics, n_questions, chats)
    names = names_for(rng, "held_out")
    begun = set[str]()
    facts = list[_Fact]()
    exchanges = list[tuple[str, str]]()
    said: dict[str, list[str]] = {topic: [] for topic in topics}
    for topic, is_fact in plan:
        if is_fact:
            attribute = rng.choice(sorted(ATTRIBUTES))
            fact = _Fact(
                names.pop(), attribute, unlike_value(rng, attribute, begun), topic, len(exchanges)
            )
            facts.append(fact)
            exchanges.append((_statement(rng, fact), rng.choice(NOTED)))
        else:
            exchanges.append(small_talk(rng, topic, said[topic]))
    questions = tuple(_question(rng, fact, len(exchanges)) for fact in facts)
    return TopicConversation(
        seed,
        rng.choice(SYSTEM_LINES),
        tuple(exchanges),
        tuple(topic for topic, _ in plan),
        questions,
    )


def _plan(
    rng: random.Random, topics: Sequence[str], facts: int, chats: int
) -> list[tuple[str, bool]]:
    """Each exchange's topic and whether it states a fact: stretches of one topic, no topic twice in a row."""
    visits = [topic for _ in range(_VISITS) for topic in rng.sample(topics, len(topics))]
    for at in range(1, len(visits)):
        if visits[at] == visits[at - 1]:
            visits[at - 1], visits[at - 2] = visits[at - 2], visits[at - 1]
    kinds: list[list[bool]] = [[] for _ in visits]
    for count, is_fact in ((facts, True), (chats, False)):
        start = rng.randrange(len(visits))
        for index in range(count):
            kinds[(start + index) % len(visits)].append(is_fact)
    plan = []
    for topic, stretch in zip(visits, kinds, strict=True):
        rng.shuffle(stretch)
        plan += [(topic, is_fact) for is_fact in stretch]
    return plan


def unlike_value(rng: random.Random, attribute: str, begun: set[str]) -> str:
    """A value that begins like no other of this conversation, as long as there are such: see `reference`'s README."""
    for _ in range(20):
        value = value_for(attribute, rng, "held_out")
        if first_piece(value) not in begun:
            break
    begun.add(first_piece(value))
    return value


def _statement(rng: random.Random, fact: _Fact) -> str:
    clause = CLAUSE.format(name=fact.name, attribute=fact.attribute, value=fact.value)
    statement = rng.choice(STATEMENTS).format(clause=clause)
    return f"{line(rng, USER_LINES, fact.topic)} {sentence(statement)}"


def _question(rng: random.Random, fact: _Fact, exchanges: int) -> Question:
    asked = rng.choice(QUESTIONS).format(name=fact.name, attribute=fact.attribute)
    places: tuple[Place, ...] = ("early", "middle", "late")
    lead = (line(rng, USER_LINES, fact.topic), line(rng, REPLY_LINES, fact.topic))
    return Question(
        lead, asked, fact.value, fact.topic, places[min(2, 3 * fact.exchange // exchanges)]
    )
