"""Conversations about several topics that come and go, with facts in each, for `longconv`.

The language is the reference model's; seeds, names and values are of its held-out split. A fact is
stated among small talk about its topic, and asked for when the conversation has come back to that
topic: the topic, not the person's name, is what the question shares with the stretch that states
it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reference.chat import REPLY_LINES, TOPICS, USER_LINES, draw_line, small_talk
from reference.conversation import (
    CLAUSE,
    MAX_FACTS,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    capitalize,
    ends_in,
)
from reference.words import ATTRIBUTES, draw_names, draw_value, first_piece

Place = Literal["early", "middle", "late"]
PLACES: tuple[Place, ...] = ("early", "middle", "late")

# Mean tokens of an exchange of small talk, and of one that states a fact.
_CHAT_TOKENS = 38
_FACT_TOKENS = 40
_VISITS = 2
# Draws of a value before one that begins like another is accepted.
_TRIES = 20


@dataclass(frozen=True)
class Question:
    """One question, asked after the whole conversation.

    `place` is the third of the conversation that states the answer. `lead` is a line on the topic
    and the assistant's reply to it, which come before the question in the same turn.
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
        """True if a reply ends in exactly the expected value."""
        return ends_in(reply, self.answer)


@dataclass(frozen=True)
class TopicConversation:
    """A conversation of user and assistant, the topic of each exchange, and its questions."""

    seed: int
    system: str
    exchanges: tuple[tuple[str, str], ...]
    topics: tuple[str, ...]
    questions: tuple[Question, ...]

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as OpenAI-style messages, the system's first."""
        messages = [{"role": "system", "content": self.system}]
        for user, reply in self.exchanges:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
        return messages


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
    """A conversation of about `n_tokens` tokens on `n_topics` topics, each visited twice.

    It states a fact for each question. The same arguments give the same conversation. Raises
    ValueError for more facts (42) or topics (12) than the language has.
    """
    if n_questions > MAX_FACTS or n_topics > len(TOPICS):
        raise ValueError(
            f"at most {MAX_FACTS} questions and {len(TOPICS)} topics; "
            f"{n_questions}, {n_topics} requested"
        )
    rng = random.Random(f"topics:{seed}")
    topics = rng.sample(sorted(TOPICS), n_topics)
    chats = max(0, round((n_tokens - n_questions * _FACT_TOKENS) / _CHAT_TOKENS))
    plan = _plan(rng, topics, n_questions, chats)
    facts, exchanges = _write(rng, plan)
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
    """Topic of each exchange and whether it states a fact.

    Exchanges come in stretches of one topic, and no topic comes twice in a row.
    """
    visits = [topic for _ in range(_VISITS) for topic in rng.sample(topics, len(topics))]
    for index in range(1, len(visits)):
        if visits[index] == visits[index - 1]:
            visits[index - 1], visits[index - 2] = visits[index - 2], visits[index - 1]
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


def _write(
    rng: random.Random, plan: Sequence[tuple[str, bool]]
) -> tuple[list[_Fact], list[tuple[str, str]]]:
    """Facts and exchanges of a plan, in order."""
    names = draw_names(rng, "held_out")
    first_pieces = set[str]()
    facts = list[_Fact]()
    exchanges = list[tuple[str, str]]()
    sentences: dict[str, list[str]] = {topic: [] for topic, _ in plan}
    for topic, is_fact in plan:
        if is_fact:
            attribute = rng.choice(sorted(ATTRIBUTES))
            name = names.pop()
            value = draw_distinct_value(rng, attribute, first_pieces)
            facts.append(_Fact(name, attribute, value, topic, len(exchanges)))
            exchanges.append((_statement(rng, facts[-1]), rng.choice(NOTED)))
        else:
            exchanges.append(small_talk(rng, topic, sentences[topic]))
    return facts, exchanges


def draw_distinct_value(rng: random.Random, attribute: str, first_pieces: set[str]) -> str:
    """A value that begins unlike those before, as far as there are any: see `reference`'s README.

    `first_pieces` are the beginnings so far, to which that of the new value is added.
    """
    for _ in range(_TRIES):
        value = draw_value(attribute, rng, "held_out")
        if first_piece(value) not in first_pieces:
            break
    first_pieces.add(first_piece(value))
    return value


def _statement(rng: random.Random, fact: _Fact) -> str:
    clause = CLAUSE.format(name=fact.name, attribute=fact.attribute, value=fact.value)
    statement = rng.choice(STATEMENTS).format(clause=clause)
    return f"{draw_line(rng, USER_LINES, fact.topic)} {capitalize(statement)}"


def _question(rng: random.Random, fact: _Fact, exchanges: int) -> Question:
    text = rng.choice(QUESTIONS).format(name=fact.name, attribute=fact.attribute)
    lead = (draw_line(rng, USER_LINES, fact.topic), draw_line(rng, REPLY_LINES, fact.topic))
    place = PLACES[min(2, 3 * fact.exchange // exchanges)]
    return Question(lead, text, fact.value, fact.topic, place)
