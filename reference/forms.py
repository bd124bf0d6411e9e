"""Forms of the mixed language: statements, corrections, places of a question, and their weights.

The plain language of `conversation.py` has one form for every statement, one fact a person, and
questions in messages of their own. The mixed language has these and the forms below.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Drawn = TypeVar("Drawn")

# Where a question stands in the user's message: alone, or after, before or between other text.
Place = Literal["alone", "last", "first", "between"]
# What an exchange of the mixed language is for.
MixedKind = Literal["chat", "tell", "ask", "list", "tool"]

# Clauses of a fact by the name of their form. In all of them person and attribute stand before the
# value: keys of the value's first token can then hold both. Answers have the form "says".
CLAUSES: Mapping[str, str] = {
    "says": "the {attribute} list says {name} {value}",
    "is": "{name}'s {attribute} is {value}",
    "of": "the {attribute} of {name} is {value}",
    "has": "{name} has {attribute} {value}",
}
# Clauses of a new value for a known fact, by the form of the clause that they change.
NEW_CLAUSES: Mapping[str, str] = {
    "says": "the {attribute} list now says {name} {value}",
    "is": "{name}'s {attribute} is now {value}",
    "of": "the {attribute} of {name} is now {value}",
    "has": "{name} now has {attribute} {value}",
}
CORRECTION_OPENINGS = (
    "Correction: {clause}.",
    "It changed, {clause}.",
    "Please update this, {clause}.",
    "I was wrong, {clause}.",
    "As of today {clause}.",
)
LIST_QUESTIONS = (
    "List every {attribute} that I have told you.",
    "Tell me every {attribute} that you know.",
    "Which {attribute} does each person have?",
    "Remind me of every {attribute}, please.",
    "I need every {attribute} again.",
)
NAMED_LIST_QUESTIONS = (
    "List the {attribute} of {names}.",
    "Tell me the {attribute} of {names}.",
    "What is the {attribute} of {names}?",
    "I need the {attribute} of {names}.",
)
LIST_ANSWER = "The {attribute} list says {items}."

# Fields of a long tool result that are not its answer.
LOG_FIELDS = ("log", "notes", "lines", "text")
LOG_LINES = (
    "ok",
    "check {number}: ok",
    "room {number} is ready",
    "line {number}: {feeling}",
    "ticket {number}, {time}",
    "call {number} {time}",
)


@dataclass(frozen=True)
class Mixture:
    """Weights of the forms of the mixed language; those of one mapping need not sum to 1.

    - `kinds`: what an exchange is for; `places`: where a question stands in its message.
    - `clauses`: forms of a statement, by their names in CLAUSES.
    - `corrections`: share of the statements that give a known fact a new value; `unmarked` is the
      share of those that look like a first statement, so that only their order tells.
    - `groups`: share of the statements that give several people's values of one attribute.
    - `facts_per_person`: largest number of facts of a person, drawn for each conversation.
    - `long_results`: share of the tool results that are long, up to `result_tokens` tokens.
    - `text_tokens`: longest text around a question, in tokens.
    - `list_items`: fewest and most facts of an answer that is a list; `named` is the share of the
      lists whose question names the people, in the order of the answer.
    """

    kinds: Mapping[MixedKind, float] = field(
        default_factory=lambda: {"chat": 0.1, "tell": 0.3, "ask": 0.4, "list": 0.1, "tool": 0.1}
    )
    places: Mapping[Place, float] = field(
        default_factory=lambda: {"alone": 0.3, "last": 0.15, "first": 0.3, "between": 0.25}
    )
    clauses: Mapping[str, float] = field(
        default_factory=lambda: {"says": 0.4, "is": 0.2, "of": 0.2, "has": 0.2}
    )
    corrections: float = 0.12
    unmarked: float = 0.2
    groups: float = 0.1
    facts_per_person: Mapping[int, float] = field(default_factory=lambda: {1: 0.3, 2: 0.4, 3: 0.3})
    long_results: float = 0.4
    result_tokens: int = 1000
    text_tokens: int = 1024
    list_items: tuple[int, int] = (5, 14)
    named: float = 0.5


# The mixture that the reference model is trained on and scored on: the only place of its weights.
MIXTURE = Mixture()


def draw_weighted(rng: random.Random, weights: Mapping[Drawn, float]) -> Drawn:
    """Draw a key with probability proportional to its weight."""
    return rng.choices(list(weights), weights=list(weights.values()))[0]


def draw_scale(rng: random.Random, least: float, most: float) -> float:
    """Draw between `least` and `most`, each order of magnitude equally often."""
    if most <= least:
        return most
    return float(least * (most / least) ** rng.random())
