"""LoCoMo's format: sessions of lines, whose ids are the evidence of questions. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_SESSION = re.compile(r"session_(\d+)")


@dataclass(frozen=True)
class Line:
    """One line of a speaker, in session number `session`, held on `date`."""

    id: str
    speaker: str
    text: str
    session: int
    date: str


@dataclass(frozen=True)
class LocomoMessage:
    """A message of a conversation, with the ids of its lines."""

    role: str
    content: str
    lines: tuple[str, ...] = ()


def read_lines(conversation: Mapping[str, Any]) -> list[Line]:
    """All lines, in the order of the sessions."""
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


def to_sessions(conversation: Mapping[str, Any]) -> list[list[LocomoMessage]]:
    """Messages of each session of a conversation: speaker A is the user, B the assistant.

    The date of a session precedes the user's first text in it.
    """
    user = conversation["speaker_a"]
    sessions = groupby(read_lines(conversation), key=lambda line: line.session)
    return [list(_session_messages(list(lines), user)) for _, lines in sessions]


def to_messages(conversation: Mapping[str, Any]) -> list[LocomoMessage]:
    """Messages of all sessions of a conversation, as `to_sessions`."""
    return [message for session in to_sessions(conversation) for message in session]


def _session_messages(lines: Sequence[Line], user: str) -> Iterator[LocomoMessage]:
    context = f"({lines[0].date}) " if lines[0].date else ""
    for speaker, group in groupby(lines, key=lambda line: line.speaker):
        run = list(group)
        text = " ".join(line.text for line in run)
        if speaker != user and context:
            yield LocomoMessage("user", context.strip())
        if speaker == user:
            text = context + text
        context = ""
        yield LocomoMessage(
            "user" if speaker == user else "assistant", text, tuple(line.id for line in run)
        )


def _date(conversation: Mapping[str, Any], session: int) -> str:
    return str(conversation.get(f"session_{session}_date_time", ""))
