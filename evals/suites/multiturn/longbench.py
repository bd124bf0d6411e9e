"""Dialogues of kind `longbench`: question answering sets of LongBench, several items a dialogue.

LoopServe's Algorithm 1, with two changes. The evidence of a question is in its turn or an earlier one:
as printed, a question's own item need not be among the contexts drawn. And a turn may show the next
item already, so that some questions are on earlier turns alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from evals.errors import BadDataFile, BadExample
from evals.languages.base import contains_value
from evals.suites.multiturn.dialogue import CUE, Dialogue, Size, Turn

_SYSTEM = "Answer from the texts of this conversation, in a few words."
_DRAWS = 50
_POOLS = 2


@dataclass(frozen=True)
class _Item:
    """An item of a set: a context in paragraphs, a question on it, and its possible answers."""

    paragraphs: tuple[str, ...]
    question: str
    answers: tuple[str, ...]

    def contains(self, answers: Sequence[str]) -> bool:
        """True if the context has one of these answers."""
        return any(contains_value(text, each) for text in self.paragraphs for each in answers)


def build(seed: int, size: Size, data: Sequence[Path]) -> Dialogue:
    """The dialogue of a seed, of items of one file.

    Raises BadDataFile, and BadExample where the files have too few items for the turns.
    """
    rng = Random(f"multiturn:longbench:{seed}")
    files = [file for source in data for file in _list_files(source)]
    items = _read_items(files[seed % len(files)])
    for _ in range(_DRAWS):
        turns = _try(rng, size, items)
        if turns is not None:
            return Dialogue(seed, "longbench", _SYSTEM, turns)
    raise BadExample(
        f"{len(items)} items do not make {size.turns} turns with {_POOLS} contexts each that "
        "have no answer in them"
    )


def _list_files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.jsonl")) if source.is_dir() else [source]
    if not files:
        raise BadDataFile(f"{source} has no .jsonl file in it")
    return files


def _read_items(path: Path) -> list[_Item]:
    """Items of a file, each with an answer. Raises BadDataFile."""
    try:
        entries = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
        return [
            _Item(
                tuple(text.strip() for text in entry["context"].split("\n") if text.strip()),
                entry["input"],
                tuple(str(answer) for answer in entry["answers"]),
            )
            for entry in entries
            if entry["answers"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadDataFile(f"{path} is no file of LongBench: {error!r}") from error


def _try(rng: Random, size: Size, items: Sequence[_Item]) -> tuple[Turn, ...] | None:
    """Turns of one draw of items; None if too few contexts are free of the answers."""
    if len(items) <= size.turns:
        return None
    drawn = rng.sample(range(len(items)), size.turns)
    asked = [items[number] for number in drawn]
    answers = [answer for item in asked for answer in item.answers]
    rest = [item for index, item in enumerate(items) if index not in drawn]
    irrelevant = [item for item in rest if not item.contains(answers)]
    if len(irrelevant) < _POOLS * size.turns:
        return None
    pools = rng.sample(irrelevant, _POOLS * size.turns)
    shown: list[list[int]] = []
    open_items = set(range(size.turns))
    turns = []
    for number in range(size.turns):
        # One item more than the turn's own: its question may come when the turn is over.
        drawable = range(min(number + 2, size.turns))
        shown.append(sorted(rng.sample(drawable, rng.randint(1, len(drawable)))))
        known = {each for contexts in shown for each in contexts}
        if not known & open_items:
            added = rng.choice(sorted(open_items & set(drawable)))
            shown[-1].append(added)
            known.add(added)
        chosen = rng.choice(sorted(known & open_items))
        open_items.remove(chosen)
        contexts = [asked[each] for each in shown[-1]]
        contexts += pools[_POOLS * number : _POOLS * (number + 1)]
        turns.append(
            Turn(
                tuple(text for item in contexts for text in item.paragraphs),
                asked[chosen].question,
                asked[chosen].answers,
                tuple(turn for turn, each in enumerate(shown) if chosen in each),
                cue=CUE,
            )
        )
    return tuple(turns)
