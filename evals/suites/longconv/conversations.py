"""Conversations about several topics that come and go, with facts in each, for `longconv`.

A fact is stated among small talk about its topic, and asked for when the conversation has come back
to that topic: the topic, not the person's name, is what the question shares with the stretch that
states it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from evals.errors import BadExample
from evals.languages.base import Fact, Language
from evals.languages.reference import REFERENCE

Place = Literal["early", "middle", "late"]
PLACES: tuple[Place, ...] = ("early", "middle", "late")

_VISITS = 2


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
class _Stated:
    """A fact with its topic and the number of the exchange that states it."""

    fact: Fact
    topic: str
    exchange: int


def generate_topics(
    seed: int,
    n_tokens: int,
    n_topics: int = 8,
    n_questions: int = 32,
    language: Language = REFERENCE,
) -> TopicConversation:
    """A conversation of about `n_tokens` tokens on `n_topics` topics, each visited twice.

    It states a fact for each question. The same arguments give the same conversation. Raises
    BadExample for more facts or topics than the language has.
    """
    if n_questions > language.max_facts or n_topics > len(language.topics):
        raise BadExample(
            f"at most {language.max_facts} questions and {len(language.topics)} topics; "
            f"{n_questions}, {n_topics} requested"
        )
    rng = random.Random(f"topics:{seed}")
    topics = rng.sample(language.topics, n_topics)
    chats = max(0, round((n_tokens - n_questions * language.fact_tokens) / language.chat_tokens))
    plan = _plan(rng, topics, n_questions, chats)
    facts, exchanges = _write(rng, plan, language)
    questions = tuple(_question(rng, fact, len(exchanges), language) for fact in facts)
    return TopicConversation(
        seed,
        rng.choice(language.system_lines),
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
    rng: random.Random, plan: Sequence[tuple[str, bool]], language: Language
) -> tuple[list[_Stated], list[tuple[str, str]]]:
    """Facts and exchanges of a plan, in order."""
    names = language.draw_names(rng)
    used = set[str]()
    facts = list[_Stated]()
    exchanges = list[tuple[str, str]]()
    said: dict[str, list[str]] = {topic: [] for topic, _ in plan}
    for topic, is_fact in plan:
        if is_fact:
            attribute = rng.choice(language.attributes)
            name = names.pop()
            fact = Fact(name, attribute, language.draw_value(rng, attribute, used))
            facts.append(_Stated(fact, topic, len(exchanges)))
            statement = language.state(rng, fact)
            user = f"{language.line(rng, topic)} {statement}"
            exchanges.append((user, language.acknowledge(rng, fact)))
        else:
            exchanges.append(language.small_talk(rng, topic, said[topic]))
    return facts, exchanges


def _question(rng: random.Random, stated: _Stated, exchanges: int, language: Language) -> Question:
    text = language.ask(rng, stated.fact)
    lead = language.lead(rng, stated.topic)
    place = PLACES[min(2, 3 * stated.exchange // exchanges)]
    return Question(lead, text, stated.fact.value, stated.topic, place)
