"""LoCoMo's form: sessions of lines, each with an id that questions name as their evidence. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_SESSION = re.compile(r"session_(\d+)")


@dataclass(frozen=True)
class Line:
    """What one of the two says at a time. `session` is its session's number, `date` when that was."""

    id: str
    speaker: str
    text: str
    session: int
    date: str


@dataclass(frozen=True)
class Spoken:
    """A message of the conversation, with the ids of the lines that it holds."""

    role: str
    content: str
    lines: tuple[str, ...] = ()


def lines_of(conversation: Mapping[str, Any]) -> list[Line]:
    """All lines in the order of the sessions."""
    numbers = sorted(int(match[1]) for key in conversation if (match := _SESSION.fullmatch(key)))
    return [
        Line(
            line.get("dia_id", ""),
            line["speaker"],
            str(line["text"]),
            number,
            _date(conversation, number),
        )
        for number in numbers
        for line in conversation[f"session_{number}"]
    ]


def spoken_in(conversation: Mapping[str, Any]) -> list[Spoken]:
    """FaultClient A is the user, B the assistant; each session's date leads the user's first words in it."""
    user = conversation["speaker_a"]
    sessions = groupby(lines_of(conversation), key=lambda line: line.session)
    return [spoken for _, lines in sessions for spoken in _session(list(lines), user)]


def _session(lines: Sequence[Line], user: str) -> Iterator[Spoken]:
    context = f"({lines[0].date}) " if lines[0].date else ""
    for speaker, said in groupby(lines, key=lambda line: line.speaker):
        run = list(said)
        text = " ".join(line.text for line in run)
        if speaker != user and context:
            yield Spoken("user", context.strip())
        if speaker == user:
            text = context + text
        context = ""
        yield Spoken(
            "user" if speaker == user else "assistant", text, tuple(line.id for line in run)
        )


def _date(conversation: Mapping[str, Any], session: int) -> str:
    return str(conversation.get(f"session_{session}_date_time", ""))
