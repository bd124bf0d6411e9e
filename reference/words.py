"""Pieces of names and values, and the split that keeps those of evaluation out of training."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Literal

Split = Literal["train", "held_out"]

# One name or value in four belongs to evaluation.
_HELD_OUT_SHARE = 4


def _pieces(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Only those that the shipped tokenizer keeps as one token before every end: a name is two tokens.
NAME_STARTS = _pieces(
    "Al Ar Bar Bel Bren Cal Car Del El Er Fal Fen Gar Hal Har Hel Il Ir Jar Jen Kar Kel Len Mar "
    "Mel Nar Nor Ol Or Par Pel Per Ral Ren Sal Sel Tal Ter Ul Ur Val Ven Wal Wen Yar Zel"
)
NAME_ENDS = _pieces(
    "bak bin by da dan das dek do dra fa fi fo ga gan gus ja ji ka kas ki ko kus la lia lin lo "
    "lun ma mas mi mir mo mus na nak ni nor nus pa pin po ra rak ri rik ro rus sa san shi so sta "
    "ta tas ti to tus va vi vin vo xa ya za zo"
)
CITY_STARTS = _pieces(
    "Ash Birch Black Brook Clay Cold Deep East Elm Fair Fox Glen Green Grey High Iron Lake Long "
    "Mill New North Oak Old Pine Red River Rock Salt South Stone West White Wind Wolf"
)
CITY_ENDS = _pieces(
    "borough bridge burg by dale field ford gate ham haven hill mouth port side ton view ville "
    "wick wood worth"
)
COLOURS = _pieces(
    "amber blue bronze cedar copper coral flint garnet glass gold hazel honey indigo ivory jade "
    "lemon lunar marble mint nickel olive onyx opal pearl pepper plum ruby sage sand scarlet "
    "silver snow solar storm summer teal topaz velvet violet winter zinc"
)
THINGS = _pieces(
    "arrow birch cloud comet crane crown dawn delta eagle ember falcon fern forest frost heron "
    "lily lotus maple meadow moon ocean orchid otter raven river robin spruce star swan tiger "
    "tulip willow"
)
DESK_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def get_split(text: str) -> Split:
    """The split of a name or a value, by a hash of its text: the two sets are disjoint."""
    return "held_out" if zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0 else "train"


def _letter_and_four_digits(rng: random.Random) -> str:
    return f"{rng.choice(DESK_LETTERS)}{rng.randrange(10_000):04d}"


def _letter_and_digits(rng: random.Random) -> str:
    return f"{rng.choice(DESK_LETTERS)}{rng.randrange(10, 100)}"


def _letter_and_digit(rng: random.Random) -> str:
    return f"{rng.choice(DESK_LETTERS)}{rng.randrange(10)}"


def _flight(rng: random.Random) -> str:
    return f"{rng.choice(DESK_LETTERS)}{rng.choice(DESK_LETTERS)}{rng.randrange(100, 1000)}"


def _city(rng: random.Random) -> str:
    return rng.choice(CITY_STARTS) + rng.choice(CITY_ENDS)


def _two_words(rng: random.Random) -> str:
    return f"{rng.choice(COLOURS)} {rng.choice(THINGS)}"


# Attributes of a person, each with the function that draws its values. No value is a single word:
# held-out ones would be words that training only ever showed with a second one.
ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "extension": _letter_and_four_digits,
    "badge": _letter_and_four_digits,
    "pin": _letter_and_four_digits,
    "locker": _letter_and_digits,
    "desk": _letter_and_digits,
    "gate": _letter_and_digit,
    "flight": _flight,
    "city": _city,
    "password": _two_words,
    "project": _two_words,
}


def draw_value(attribute: str, rng: random.Random, split: Split) -> str:
    """Draw a value of an attribute from the split's own values."""
    while True:
        value = ATTRIBUTES[attribute](rng)
        if get_split(value) == split:
            return value


def draw_names(rng: random.Random, split: Split) -> list[str]:
    """Distinct names of the split in random order, each made of two syllables.

    No two names of one list share a syllable, so that a conversation's people are easy to
    distinguish.
    """
    starts = rng.sample(NAME_STARTS, len(NAME_STARTS))
    ends = rng.sample(NAME_ENDS, len(NAME_ENDS))
    names = []
    for start in starts:
        for end in ends:
            if get_split(start + end) == split:
                names.append(start + end)
                ends.remove(end)
                break
    rng.shuffle(names)
    return names


def first_piece(value: str) -> str:
    """Beginning of a value: the letter before digits, half of a city's name, or the first word."""
    if value[1:2].isdigit() or value[2:3].isdigit():
        return value[0]
    return next((start for start in CITY_STARTS if value.startswith(start)), value.split()[0])
