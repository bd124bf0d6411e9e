"""The reference model's language: held-out names and values in the forms that it was trained on."""

from random import Random

from evals.languages.base import Fact, Language
from reference import chat
from reference.conversation import (
    CLAUSE,
    CORRECTIONS,
    MAX_FACTS,
    NOTED,
    QUESTIONS,
    STATEMENTS,
    SYSTEM_LINES,
    capitalize,
    ends_in,
)
from reference.words import ATTRIBUTES, draw_names, draw_value, first_piece

# Draws of a value before one that begins like another is accepted.
_TRIES = 20


def _draw_names(rng: Random) -> list[str]:
    return draw_names(rng, "held_out")


def _draw_value(rng: Random, attribute: str, used: set[str]) -> str:
    """A value that begins unlike those before, as far as there are any: see `reference`'s README.

    `used` are the beginnings so far, to which that of the new value is added.
    """
    for _ in range(_TRIES):
        value = draw_value(attribute, rng, "held_out")
        if first_piece(value) not in used:
            break
    used.add(first_piece(value))
    return value


def _state(rng: Random, fact: Fact) -> str:
    clause = CLAUSE.format(name=fact.name, attribute=fact.attribute, value=fact.value)
    return capitalize(rng.choice(STATEMENTS).format(clause=clause))


def _correct(rng: Random, fact: Fact) -> str:
    return rng.choice(CORRECTIONS).format(
        name=fact.name, attribute=fact.attribute, value=fact.value
    )


def _acknowledge(rng: Random, fact: Fact) -> str:
    return rng.choice(NOTED)


def _ask(rng: Random, fact: Fact) -> str:
    return rng.choice(QUESTIONS).format(name=fact.name, attribute=fact.attribute)


def _answer_prefix(fact: Fact) -> str:
    return f"The {fact.attribute} list says {fact.name}"


def _statement_span(fact: Fact) -> str:
    return f"{fact.name} {fact.value}"


def _line(rng: Random, topic: str) -> str:
    return chat.draw_line(rng, chat.USER_LINES, topic)


def _lead(rng: Random, topic: str) -> tuple[str, str]:
    return _line(rng, topic), chat.draw_line(rng, chat.REPLY_LINES, topic)


REFERENCE = Language(
    name="reference",
    topics=tuple(sorted(chat.TOPICS)),
    attributes=tuple(sorted(ATTRIBUTES)),
    worded=tuple(sorted(ATTRIBUTES)),
    closing_cue="",
    system_lines=SYSTEM_LINES,
    max_facts=MAX_FACTS,
    chat_tokens=38,
    fact_tokens=40,
    draw_names=_draw_names,
    draw_value=_draw_value,
    state=_state,
    correct=_correct,
    acknowledge=_acknowledge,
    ask=_ask,
    answer_prefix=_answer_prefix,
    statement_span=_statement_span,
    small_talk=chat.small_talk,
    line=_line,
    lead=_lead,
    is_answer=ends_in,
)
