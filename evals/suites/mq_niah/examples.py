"""Examples of MQ-NIAH in the reference model's language: facts to be asked for among others and small talk.

RepairKV 4.1 and appendix B. A needle is a fact that some question asks for; a distractor is one that none does.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from evals.errors import BadExample
from evals.harness import Message
from evals.suites.longconv.conversations import unlike_value
from reference.chat import TOPICS, small_talk
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
from reference.words import ATTRIBUTES, names_for

PARTITIONS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: ("2→1",),
        4: ("14→23", "24→13", "34→12"),
        6: ("156→234", "256→134", "356→124", "456→123"),
        8: ("5678→1234", "1678→2345", "2678→1345", "3678→1245", "4678→1235"),
    }
)
"""Which needles the first and the second turn ask for, counted from the context's beginning (appendix B).

The second turn never asks for the latest ones: of 6 and 8 needles the two latest, else the latest.
"""
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5


@dataclass(frozen=True)
class Needle:
    """A fact that is asked for. `span`: the words of its statement that a repair should bring back."""

    name: str
    attribute: str
    value: str
    question: str

    @property
    def span(self) -> str:
        """Key and value, as they stand in the statement."""
        return f"{self.name} {self.value}"

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply ends in exactly the value asked for."""
        return gives(reply, self.value)


@dataclass(frozen=True)
class Example:
    """A context, and its needles in the order in which it states them. `people`: all that it states facts of."""

    context: tuple[Message, ...]
    needles: tuple[Needle, ...]
    people: frozenset[str]

    def asked(self, numbers: Sequence[int]) -> tuple[Needle, ...]:
        """The needles of these numbers, the first is 1."""
        return tuple(self.needles[number - 1] for number in numbers)


def turns_of(partition: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The needles' numbers that the first and the second turn of a partition ask for."""
    first, second = (tuple(map(int, side)) for side in partition.split("→"))
    return first, second


def question_of(needles: Sequence[Needle]) -> Message:
    """All their questions as one message of the user's: what is known of a turn before it is said."""
    return {"role": "user", "content": " ".join(needle.question for needle in needles)}


def example(
    seed: int,
    needles: int,
    distractors: int,
    tokens: int,
    length_of: Callable[[Sequence[Message]], int],
) -> Example:
    """A context of about `tokens` tokens, as `length_of` counts those of messages; a function of its arguments.

    Raises BadExample where so many facts do not fit in.
    """
    facts = needles + distractors
    if facts > MOST_FACTS:
        raise BadExample(
            f"{needles} needles and {distractors} distractors: the language has {MOST_FACTS} people"
        )
    rng = random.Random(f"mq-niah:{seed}:{needles}:{distractors}:{tokens}")
    found, statements = _facts(rng, facts)
    system: Message = {"role": "system", "content": rng.choice(SYSTEM_LINES)}
    room = tokens - length_of(
        [system, *(message for exchange in statements for message in exchange)]
    )
    chats = _chats(rng, room, length_of)
    if len(chats) < facts:
        raise BadExample(
            f"{tokens} tokens have no room for {facts} facts among small talk; allow more tokens"
        )
    said = _among(rng, chats, statements)
    asked = sorted(rng.sample(range(facts), needles))
    return Example(
        context=(system, *(message for exchange in said for message in exchange)),
        needles=tuple(found[at] for at in asked),
        people=frozenset(fact.name for fact in found),
    )


def other_question(
    seed: int, one: Example, numbers: Sequence[int], distractors: int, tokens: int
) -> Message:
    """What the next example would ask whose second turn is about nobody of this one: the donor of WrongQ-K."""

    def short(messages: Sequence[Message]) -> int:
        return sum(len(str(message["content"])) // 3 for message in messages)

    for donor in count(seed + 1_000_000):
        asked = example(donor, len(one.needles), distractors, tokens, short).asked(numbers)
        if not any(needle.name in one.people for needle in asked):
            return question_of(asked)
    raise AssertionError("some example is about other people")


def _facts(rng: random.Random, facts: int) -> tuple[list[Needle], list[list[Message]]]:
    """Facts about as many people, no value beginning like another, each with the exchange that states it."""
    names = names_for(rng, "held_out")
    begun = set[str]()
    found = list[Needle]()
    statements = list[list[Message]]()
    for name in names[:facts]:
        attribute = rng.choice(sorted(ATTRIBUTES))
        value = unlike_value(rng, attribute, begun)
        clause = CLAUSE.format(name=name, attribute=attribute, value=value)
        statements.append(
            _exchange(sentence(rng.choice(STATEMENTS).format(clause=clause)), rng.choice(NOTED))
        )
        question = rng.choice(QUESTIONS).format(name=name, attribute=attribute)
        found.append(Needle(name, attribute, value, question))
    return found, statements


def _chats(
    rng: random.Random, tokens: int, length_of: Callable[[Sequence[Message]], int]
) -> list[list[Message]]:
    topics = rng.sample(sorted(TOPICS), _TOPICS)
    said = list[str]()
    chats = list[list[Message]]()
    while tokens > 0:
        topic = topics[len(chats) // _CHATS_ON_A_TOPIC % _TOPICS]
        chats.append(_exchange(*small_talk(rng, topic, said)))
        tokens -= length_of(chats[-1])
    return chats


def _among(
    rng: random.Random, chats: Sequence[list[Message]], statements: Sequence[list[Message]]
) -> list[list[Message]]:
    """Statements in their order at random places among small talk, at least one exchange of it before each."""
    before = dict(
        zip(sorted(rng.sample(range(len(chats)), len(statements))), statements, strict=True)
    )
    said = list[list[Message]]()
    for at, chat in enumerate(chats):
        said.append(chat)
        said += [before[at]] if at in before else []
    return said


def _exchange(user: str, reply: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
