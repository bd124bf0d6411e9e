"""Examples of MQ-NIAH: needles among distractors and small talk.

RepairKV 4.1 and appendix B. A needle is a fact that some question asks for; a distractor is a fact
that no question asks for.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

from evals.errors import BadExample
from evals.harness import Message
from evals.languages.base import Fact, Language
from evals.languages.reference import REFERENCE

# Needles of the first and of the second turn, counted from the context's beginning (appendix B).
# The second turn never asks for the latest ones: of 6 and 8 needles the two latest, else the
# latest.
PARTITIONS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        2: ("2→1",),
        4: ("14→23", "24→13", "34→12"),
        6: ("156→234", "256→134", "356→124", "456→123"),
        8: ("5678→1234", "1678→2345", "2678→1345", "3678→1245", "4678→1235"),
    }
)
_TOPICS = 4
_CHATS_ON_A_TOPIC = 5
# Distance of the seeds of donors from those of examples.
_DONOR_SEEDS = 1_000_000


@dataclass(frozen=True)
class Needle:
    """A fact that is asked for.

    `span` are the key and the value as in the statement: the words that a repair should bring back.
    """

    name: str
    attribute: str
    value: str
    question: str
    span: str


@dataclass(frozen=True)
class Example:
    """A context and its needles in the order of their statements.

    `people` are the names of all facts, distractors included.
    """

    context: tuple[Message, ...]
    needles: tuple[Needle, ...]
    people: frozenset[str]

    def get_needles(self, numbers: Sequence[int]) -> tuple[Needle, ...]:
        """Needles of these numbers, counted from 1."""
        return tuple(self.needles[number - 1] for number in numbers)


def parse_partition(partition: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Numbers of the needles that the first and the second turn of a partition ask for."""
    first, second = (tuple(map(int, side)) for side in partition.split("→"))
    return first, second


def build_question(needles: Sequence[Needle]) -> Message:
    """One user message with all questions for these needles: the repair signal of a turn."""
    return {"role": "user", "content": " ".join(needle.question for needle in needles)}


def build_example(
    seed: int,
    needles: int,
    distractors: int,
    tokens: int,
    count_tokens: Callable[[Sequence[Message]], int],
    language: Language = REFERENCE,
) -> Example:
    """A context of about `tokens` tokens, a function of the arguments.

    `count_tokens` counts the tokens of messages. Raises BadExample if the facts do not fit.
    """
    facts = needles + distractors
    if facts > language.max_facts:
        raise BadExample(
            f"{needles} needles and {distractors} distractors: "
            f"the language has {language.max_facts} people"
        )
    rng = random.Random(f"mq-niah:{seed}:{needles}:{distractors}:{tokens}")
    drawn, statements = _draw_facts(rng, facts, language)
    system: Message = {"role": "system", "content": rng.choice(language.system_lines)}
    room = tokens - count_tokens([system, *_flatten(statements)])
    chats = _draw_chats(rng, room, count_tokens, language)
    if len(chats) < facts:
        raise BadExample(
            f"{tokens} tokens have no room for {facts} facts among small talk; allow more tokens"
        )
    exchanges = _interleave(rng, chats, statements)
    indices = sorted(rng.sample(range(facts), needles))
    return Example(
        context=(system, *_flatten(exchanges)),
        needles=tuple(drawn[index] for index in indices),
        people=frozenset(fact.name for fact in drawn),
    )


def build_donor_question(
    seed: int,
    example: Example,
    numbers: Sequence[int],
    distractors: int,
    tokens: int,
    language: Language = REFERENCE,
) -> Message:
    """Question of another example about people that are not in `example`: the donor of WrongQ-K."""

    def estimate_tokens(messages: Sequence[Message]) -> int:
        return sum(len(str(message["content"])) // 3 for message in messages)

    for donor_seed in count(seed + _DONOR_SEEDS):
        donor = build_example(
            donor_seed, len(example.needles), distractors, tokens, estimate_tokens, language
        )
        needles = donor.get_needles(numbers)
        if not any(needle.name in example.people for needle in needles):
            return build_question(needles)
    raise AssertionError("some example is about other people")


def _draw_facts(
    rng: random.Random, facts: int, language: Language
) -> tuple[list[Needle], list[list[Message]]]:
    """Facts about as many people, with distinct values, each with the exchange that states it."""
    names = language.draw_names(rng)
    used = set[str]()
    drawn = list[Needle]()
    statements = list[list[Message]]()
    for name in names[:facts]:
        attribute = rng.choice(language.attributes)
        value = language.draw_value(rng, attribute, used)
        fact = Fact(name, attribute, value)
        statement = language.state(rng, fact)
        statements.append(_exchange(statement, language.acknowledge(rng, fact)))
        question = language.ask(rng, fact)
        drawn.append(Needle(name, attribute, value, question, language.statement_span(fact)))
    return drawn, statements


def _draw_chats(
    rng: random.Random,
    tokens: int,
    count_tokens: Callable[[Sequence[Message]], int],
    language: Language,
) -> list[list[Message]]:
    topics = rng.sample(language.topics, min(_TOPICS, len(language.topics)))
    said = list[str]()
    chats = list[list[Message]]()
    while tokens > 0:
        topic = topics[len(chats) // _CHATS_ON_A_TOPIC % len(topics)]
        chats.append(_exchange(*language.small_talk(rng, topic, said)))
        tokens -= count_tokens(chats[-1])
    return chats


def _interleave(
    rng: random.Random, chats: Sequence[list[Message]], statements: Sequence[list[Message]]
) -> list[list[Message]]:
    """Statements in order at random points of small talk, each after some exchange of it."""
    statement_after = dict(
        zip(sorted(rng.sample(range(len(chats)), len(statements))), statements, strict=True)
    )
    exchanges = list[list[Message]]()
    for index, chat in enumerate(chats):
        exchanges.append(chat)
        if index in statement_after:
            exchanges.append(statement_after[index])
    return exchanges


def _flatten(exchanges: Sequence[list[Message]]) -> list[Message]:
    return [message for exchange in exchanges for message in exchange]


def _exchange(user: str, reply: str) -> list[Message]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
