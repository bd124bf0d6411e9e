"""LoCoMo files as the suite reads them: lines, messages, and questions with their evidence."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.errors import BadDataFile
from kvrecall_server.replay.locomo import Line, LocomoMessage, read_lines, to_sessions

# The fifth category, adversarial, is left out as in EpiCache, A.1: it rewards a model that forgot.
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop"}
_LINE_ID = re.compile(r"D\d+:\d+")


@dataclass(frozen=True)
class Question:
    """A question of the file, its answer, and the ids of the lines with its evidence."""

    text: str
    answer: str
    category: str
    evidence: frozenset[str]


@dataclass(frozen=True)
class Conversation:
    """The conversation of one file with its questions."""

    name: str
    speakers: tuple[str, str]
    lines: tuple[Line, ...]
    sessions: tuple[tuple[LocomoMessage, ...], ...]
    questions: tuple[Question, ...]

    @property
    def spoken(self) -> tuple[LocomoMessage, ...]:
        """The messages of all sessions."""
        return tuple(message for session in self.sessions for message in session)


def read_conversation(path: Path) -> Conversation:
    """Read a file, without questions whose evidence is not in it. Raises BadDataFile."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        conversation = entry["conversation"]
        lines = tuple(read_lines(conversation))
        known = {line.id for line in lines}
        questions = [
            _question(each, known) for each in entry["qa"] if each["category"] in CATEGORIES
        ]
        return Conversation(
            name=path.stem,
            speakers=(conversation["speaker_a"], conversation["speaker_b"]),
            lines=lines,
            sessions=tuple(map(tuple, to_sessions(conversation))),
            questions=tuple(each for each in questions if each.evidence),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadDataFile(f"{path} is no LoCoMo file: {error!r}") from error


def list_files(source: Path) -> list[Path]:
    """The files of a folder, or the one file. Raises BadDataFile."""
    files = sorted(source.glob("*.json")) if source.is_dir() else [source]
    if not files:
        raise BadDataFile(f"{source} has no JSON file in it")
    return files


def _question(entry: Mapping[str, Any], known: set[str]) -> Question:
    # Some evidence is written as "D8:6; D9:17" in one text.
    evidence = {each for text in entry["evidence"] for each in _LINE_ID.findall(text)}
    category = CATEGORIES[entry["category"]]
    return Question(
        str(entry["question"]), str(entry["answer"]), category, frozenset(evidence & known)
    )
