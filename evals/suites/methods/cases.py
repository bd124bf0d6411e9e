"""Cases of suite methods: a recorded conversation with planted facts, and how it goes on.

A function of the recording, the seed and the sizes: other libraries can be given the same input.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from evals import harness
from evals.errors import BadExample
from evals.harness import Message
from evals.languages.base import Fact, Language
from workers.model.tokenizer import ChatTokenizer

# Tokens of a planted fact's exchange with the template's, at most, for a case's size.
_FACT_TOKENS = 90


@dataclass(frozen=True)
class Question:
    """A question on a planted fact. `depth` is the share of the context before the statement."""

    text: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Case:
    """The context, questions each asked after it, and the recorded turns that follow it."""

    context: tuple[Message, ...]
    questions: tuple[Question, ...]
    continuation: tuple[Message, ...]


@dataclass(frozen=True)
class CaseSize:
    """Tokens of the context and of the continuation, at most, and the number of planted facts."""

    context: int
    continuation: int
    facts: int


def build_case(
    messages: Sequence[Message],
    seed: int,
    size: CaseSize,
    language: Language,
    tokenizer: ChatTokenizer,
) -> Case:
    """Plant facts at evenly spread depths between the turns of a recording.

    Raises BadExample for a recording that is too short.
    """
    rng = random.Random(f"methods:{seed}")
    room = size.context - size.facts * _FACT_TOKENS
    turns = _fit(messages, tokenizer, room)
    later = messages[sum(map(len, turns)) :]
    following = _fit(later, tokenizer, size.continuation)
    if len(turns) < size.facts or not following:
        raise BadExample(
            f"a recording of {len(messages)} messages has no room for {size.facts} facts in "
            f"{size.context} tokens with a reply after them; choose longer ones, or other sizes"
        )
    questions = list[Question]()
    context = list[Message]()
    used = set[str]()
    names = language.draw_names(rng)[: size.facts]
    after = {_turn_of(number, size.facts, len(turns)): name for number, name in enumerate(names)}
    for index, turn in enumerate(turns):
        context += turn
        if index in after:
            attribute = rng.choice(language.attributes)
            fact = Fact(after[index], attribute, language.draw_value(rng, attribute, used))
            context += _statement(rng, fact, language)
            depth = round((index + 1) / len(turns), 2)
            questions.append(Question(language.ask(rng, fact), fact.value, depth))
    return Case(tuple(context), tuple(questions), tuple(m for turn in following for m in turn))


def _fit(messages: Sequence[Message], tokenizer: ChatTokenizer, tokens: int) -> list[list[Message]]:
    """The first whole exchanges of a conversation with at most `tokens` tokens."""
    turns = list[list[Message]]()
    for turn in harness.split_exchanges(messages):
        tokens -= harness.count_tokens(tokenizer, turn)
        if tokens < 0 or turn[-1]["role"] != "assistant":
            break
        turns.append(turn)
    return turns


def _turn_of(number: int, facts: int, turns: int) -> int:
    """The turn after which a fact is planted: the middle of its share of the turns."""
    return max(0, round((number + 0.5) * turns / facts) - 1)


def _statement(rng: random.Random, fact: Fact, language: Language) -> list[Message]:
    return [
        {"role": "user", "content": language.state(rng, fact)},
        {"role": "assistant", "content": language.acknowledge(rng, fact)},
    ]
