"""Planted facts in plain English: a statement, a question about it, and the value that answers it."""

import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["tuning", "held_out"]


@dataclass(frozen=True)
class Form:
    """Wording of a kind of fact, with `{name}` and `{value}` to fill in; `value` names its kind.

    `answer` is how the reply to the question begins, up to the value.
    """

    statement: str
    question: str
    answer: str
    value: Literal["number", "plate", "words"]


# Settings were chosen on the forms, names and texts of "tuning", and are reported on the others.
FORMS: dict[Split, tuple[Form, ...]] = {
    "tuning": (
        Form(
            "The secret code of {name} is {value}. Remember it.",
            "What is the secret code of {name}?",
            "The secret code of {name} is",
            "number",
        ),
        Form(
            "Please note that the locker of {name} has the number {value}.",
            "Which number has the locker of {name}?",
            "The locker of {name} has the number",
            "number",
        ),
        Form(
            "The license plate of {name}'s car is {value}, in case you see it.",
            "What is the license plate of {name}'s car?",
            "The license plate of {name}'s car is",
            "plate",
        ),
    ),
    "held_out": (
        Form(
            "By the way, the booking number of {name} is {value}.",
            "What is the booking number of {name}?",
            "The booking number of {name} is",
            "number",
        ),
        Form(
            "The password of {name} is {value}. Keep it in mind.",
            "What is the password of {name}?",
            "The password of {name} is",
            "words",
        ),
        Form(
            "{name} has a new phone, and its extension is {value}.",
            "What is the extension of {name}'s phone?",
            "The extension of {name}'s phone is",
            "number",
        ),
        Form(
            "The flight of {name} is {value}, do not forget it.",
            "Which flight does {name} take?",
            "The flight of {name} is",
            "plate",
        ),
    ),
}
_NAMES: dict[Split, tuple[str, ...]] = {
    "tuning": ("Noor", "Hugo", "Ingrid", "Rashid", "Tova", "Emil", "Paloma", "Anselm"),
    "held_out": ("Leopold", "Zara", "Mikkel", "Farida", "Ottilie", "Bram", "Selma", "Yusuf"),
}
_WORDS = (
    "amber",
    "anchor",
    "basil",
    "canyon",
    "cedar",
    "copper",
    "falcon",
    "garnet",
    "harbor",
    "ivory",
    "jasmine",
    "lantern",
    "maple",
    "marble",
    "meadow",
    "nutmeg",
    "orchid",
    "pebble",
    "quartz",
    "raven",
    "saffron",
    "timber",
    "tundra",
    "velvet",
    "walnut",
    "willow",
)
_LETTERS = "BCDFGHJKLMNPRSTVWXZ"


@dataclass(frozen=True)
class Fact:
    """A planted fact; `answer` is the beginning of a reply to the question, up to the value."""

    statement: str
    question: str
    answer: str
    value: str


def draw_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """Draw `count` facts of one form about different people."""
    form = rng.choice(FORMS[split])
    names = rng.sample(_NAMES[split], count)
    return [
        Fact(
            form.statement.format(name=name, value=value),
            form.question.format(name=name),
            form.answer.format(name=name),
            value,
        )
        for name, value in ((name, _draw_value(rng, form.value)) for name in names)
    ]


def _draw_value(rng: random.Random, kind: str) -> str:
    if kind == "number":
        return str(rng.randrange(10_000, 100_000))
    if kind == "plate":
        return f"{''.join(rng.sample(_LETTERS, 2))} {rng.randrange(1000, 10_000)}"
    return " ".join(rng.sample(_WORDS, 2))
