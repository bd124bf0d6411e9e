"""A recorded conversation as turns with their messages and pauses with tool results. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_RESULT = "no result was recorded"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """One conversation as OpenAI-style messages; a system message comes first."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class TurnStep:
    """A turn: its new messages, up to and including the assistant's if there is one."""

    messages: tuple[Message, ...]

    @property
    def has_reply(self) -> bool:
        """True if the messages end with a recorded reply."""
        return bool(self.messages[-1]["role"] == "assistant")


@dataclass(frozen=True)
class PauseStep:
    """A pause: the results of the previous turn's tool calls, by call id; None: not recorded."""

    results: tuple[tuple[str, str | None], ...]


Step = TurnStep | PauseStep


@dataclass(frozen=True)
class Exchange:
    """The steps from one user message to the next; conversations are split between exchanges."""

    steps: tuple[Step, ...]


def split_exchanges(recording: Recording) -> list[Exchange]:
    """Split a recording into exchanges; the system message is in the first one."""
    groups: list[list[Message]] = [[]]
    for message in recording.messages:
        has_messages = any(each["role"] != "system" for each in groups[-1])
        if message["role"] == "user" and has_messages and groups[-1][-1]["role"] != "user":
            groups.append([])
        groups[-1].append(message)
    return [Exchange(tuple(_steps(group))) for group in groups if group]


def _steps(messages: Sequence[Message]) -> Iterator[Step]:
    pending: list[Message] = []
    results: dict[str, list[str]] = {}  # an id may be used by several calls of an exchange
    for message in messages:
        if message["role"] == "tool":
            results.setdefault(message["tool_call_id"], []).append(message["content"])
    for message in messages:
        if message["role"] == "tool":
            continue
        pending.append(message)
        if message["role"] != "assistant":
            continue
        yield TurnStep(tuple(pending))
        pending = []
        calls = message.get("tool_calls") or ()
        if calls:
            yield PauseStep(tuple((call["id"], _next(results.get(call["id"]))) for call in calls))
    if pending:
        yield TurnStep(tuple(pending))


def _next(texts: list[str] | None) -> str | None:
    return texts.pop(0) if texts else None
