"""Dialogues of kind `airline`: results of an agent's tools, and questions on fields of theirs.

Recorded runs such as tau-bench's. A segment is one JSON object of a tool's result. A question is on
a field of an object with a name of its own, and its value is stated in no other segment.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from evals.errors import BadExample
from evals.languages.base import contains_value
from evals.recordings import read_all
from evals.suites.multiturn.dialogue import CANDIDATES, CUE, Dialogue, Size, Turn, draw_class
from kvrecall_server.replay.recording import Recording

# Fields that name an object.
_NAMES = ("reservation_id", "flight_number")
_TOKEN = 4
# Characters of an object: a longer one is left out.
_LONGEST = 1600
_DRAWS = 200


@dataclass(frozen=True)
class _Item:
    """A JSON object of a result: its text, its name, and its fields with a text or a number."""

    text: str
    name: str
    fields: Mapping[str, str]


@dataclass(frozen=True)
class _Asked:
    """A field of an item, its value, and the number of the turn that states it."""

    item: _Item
    field: str
    value: str
    turn: int


def build(seed: int, size: Size, data: Sequence[Path]) -> Dialogue:
    """The dialogue of a seed: one run's objects in order, with one of another run in each turn.

    Raises BadDataFile, BadReplayFile, and BadExample where no run has a question for each turn.
    """
    rng = Random(f"multiturn:airline:{seed}")
    runs = [items for recording in read_all(data) if (items := list(_items(recording)))]
    if len(runs) < 2:
        raise BadExample("airline dialogues need two runs with results that name an object")
    for _ in range(_DRAWS):
        own, other = rng.sample(runs, 2)
        turns = _try(rng, size, own, other)
        if turns is not None:
            return Dialogue(seed, "airline", "You read the records of an airline.", turns)
    raise BadExample(
        f"no run has {size.tokens} tokens with a question for each of {size.turns} turns; "
        "take longer dialogues, or more recordings"
    )


def _items(recording: Recording) -> Iterator[_Item]:
    """Objects with a name in a run's tool results, each name once."""
    known = set[str]()
    for message in recording.messages:
        if message["role"] != "tool":
            continue
        for entry in _objects(str(message["content"])):
            name = next((str(entry[key]) for key in _NAMES if key in entry), "")
            text = json.dumps(entry, ensure_ascii=False)
            if name and name not in known and len(text) <= _LONGEST:
                known.add(name)
                yield _Item(text, name, dict(_fields(entry)))


def _objects(content: str) -> list[dict[str, Any]]:
    """The objects of a result: itself, or those in its list."""
    try:
        found = json.loads(content)
    except ValueError:
        return []
    entries = found if isinstance(found, list) else [found]
    return [entry for entry in entries if isinstance(entry, dict)]


def _fields(entry: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of an object's texts and numbers, those of inner objects as well."""
    for key, value in entry.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{before}{key} ")
        elif isinstance(value, str | int) and not isinstance(value, bool) and key not in _NAMES:
            yield f"{before}{key}".replace("_", " "), str(value)


def _try(
    rng: Random, size: Size, own: Sequence[_Item], other: Sequence[_Item]
) -> tuple[Turn, ...] | None:
    """Turns of a run's objects; None if some turn would have no question."""
    names = {item.name for item in own}
    strangers = [item for item in other if item.name not in names]
    share = size.tokens * _TOKEN // size.turns
    if len(strangers) < size.turns:
        return None
    stated: list[list[_Item]] = []
    waiting = list(own)
    for stranger in rng.sample(strangers, size.turns):
        items = [stranger]
        length = len(stranger.text)
        while waiting and (len(items) == 1 or length + len(waiting[0].text) <= share):
            length += len(waiting[0].text)
            items.append(waiting.pop(0))
        if len(items) == 1:
            return None
        stated.append(rng.sample(items, len(items)))
    asked = set[str]()
    turns = []
    for number in range(size.turns):
        found = _draw_field(rng, stated, number, asked, names)
        if found is None:
            return None
        asked.add(found.value)
        turns.append(_turn(rng, stated[: number + 1], found))
    return tuple(turns)


def _draw_field(
    rng: Random, stated: Sequence[Sequence[_Item]], number: int, asked: set[str], names: set[str]
) -> _Asked | None:
    """A field, stated up to turn `number`, of the run's objects, whose value no other segment has."""
    every = [item for items in stated for item in items]
    possible = [
        _Asked(item, field, value, turn)
        for turn, items in enumerate(stated[: number + 1])
        for item in items
        for field, value in item.fields.items()
        if item.name in names and value not in asked and _is_unique(item, field, value, every)
    ]
    if not possible:
        return None
    own = draw_class(rng, number, len(stated)) == "own"
    return rng.choice([each for each in possible if (each.turn == number) == own] or possible)


def _is_unique(item: _Item, field: str, value: str, every: Sequence[_Item]) -> bool:
    """True if the value is the item's alone, and at least one other item has the field."""
    others = [each for each in every if each is not item]
    return (
        item.text.count(value) == 1
        and not any(contains_value(each.text, value) for each in others)
        and not any(contains_value(each.text, item.name) for each in others)
        and any(each.fields.get(field, value) != value for each in others)
    )


def _turn(rng: Random, stated: Sequence[Sequence[_Item]], asked: _Asked) -> Turn:
    """The last turn stated with its question; candidates are the field's values stated so far."""
    values = {
        each.fields[asked.field] for items in stated for each in items if asked.field in each.fields
    }
    initials = {asked.value[0]: asked.value}
    for value in rng.sample(sorted(values), len(values)):
        if value and len(initials) < CANDIDATES:
            initials.setdefault(value[0], value)
    lettered = len(initials) > 1 and all(value[0].isalpha() for value in initials.values())
    what = f"{asked.field} of {asked.item.name}"
    return Turn(
        tuple(item.text for item in stated[-1]),
        f"What is the {what}?",
        (asked.value,),
        (asked.turn,),
        tuple(rng.sample(sorted(initials.values()), len(initials))) if lettered else (),
        (f"The {what} is",) if lettered else (),
        CUE,
    )
