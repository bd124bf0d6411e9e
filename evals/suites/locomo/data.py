"""LoCoMo's files as the suite reads them: lines, messages that know their lines, questions with their evidence."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.errors import BadDataFile
from kvrecall.replay.locomo import Line, LocomoMessage, read_lines, to_messages

CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
"""The fifth, adversarial, is left out as in EpiCache, A.1: it rewards a model that has forgotten."""
_LINE_ID = re.compile(r"D\d+:\d+")


@dataclass(frozen=True)
class Asked:
    """A question of the file, its answer, and the ids of the lines that hold it."""

    text: str
    answer: str
    category: str
    evidence: frozenset[str]


@dataclass(frozen=True)
class Conversation:
    """One file."""

    name: str
    speakers: tuple[str, str]
    lines: tuple[Line, ...]
    spoken: tuple[LocomoMessage, ...]
    questions: tuple[Asked, ...]


def read(path: Path) -> Conversation:
    """The conversation of a file. A question without a line of it as evidence is left out. Raises BadDataFile."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        told = entry["conversation"]
        lines = tuple(read_lines(told))
        known = {line.id for line in lines}
        asked = [_asked(each, known) for each in entry["qa"] if each["category"] in CATEGORIES]
        return Conversation(
            name=path.stem,
            speakers=(told["speaker_a"], told["speaker_b"]),
            lines=lines,
            spoken=tuple(to_messages(told)),
            questions=tuple(each for each in asked if each.evidence),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadDataFile(f"{path} is no LoCoMo file: {error!r}") from error


def files_of(source: Path) -> list[Path]:
    """The files of a folder, or the one file. Raises BadDataFile."""
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    if not files:
        raise BadDataFile(f"{source} has no JSON file in it")
    return files


def _asked(question: Mapping[str, Any], known: set[str]) -> Asked:
    # Some evidence is written as "D8:6; D9:17" in one text.
    evidence = {each for text in question["evidence"] for each in _LINE_ID.findall(text)}
    category = CATEGORIES[question["category"]]
    return Asked(
        str(question["question"]), str(question["answer"]), category, frozenset(evidence & known)
    )
