"""A recorded conversation, cut into what is said, what is asked of tools, and what they returned. Pure values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_RESULT = "no result was recorded"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Recording:
    """One conversation as OpenAI-style messages: the system's first, then turns of user, assistant and tools."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Say:
    """A turn: new messages up to and including the assistant's, where there is one."""

    messages: tuple[Message, ...]

    @property
    def has_reply(self) -> bool:
        """Whether an assistant's recorded words are among them."""
        return bool(self.messages[-1]["role"] == "assistant")


@dataclass(frozen=True)
class Results:
    """A pause: what the tools that were just called returned, by call id; None where nothing was recorded."""

    of_calls: tuple[tuple[str, str | None], ...]


Step = Say | Results


@dataclass(frozen=True)
class Exchange:
    """All steps from one user's message to the next: where a conversation may be cut."""

    steps: tuple[Step, ...]


def exchanges_of(recording: Recording) -> list[Exchange]:
    """The recording as exchanges of steps; the system message leads the first."""
    groups: list[list[Message]] = [[]]
    for message in recording.messages:
        spoken = any(each["role"] != "system" for each in groups[-1])
        if message["role"] == "user" and spoken and groups[-1][-1]["role"] != "user":
            groups.append([])
        groups[-1].append(message)
    return [Exchange(tuple(_steps(group))) for group in groups if group]


def _steps(messages: Sequence[Message]) -> Iterator[Step]:
    waiting: list[Message] = []
    results: dict[str, list[str]] = {}  # a call's id may come back within an exchange
    for message in messages:
        if message["role"] == "tool":
            results.setdefault(message["tool_call_id"], []).append(message["content"])
    for message in messages:
        if message["role"] == "tool":
            continue
        waiting.append(message)
        if message["role"] != "assistant":
            continue
        yield Say(tuple(waiting))
        waiting = []
        calls = message.get("tool_calls") or ()
        if calls:
            yield Results(tuple((call["id"], _next(results.get(call["id"]))) for call in calls))
    if waiting:
        yield Say(tuple(waiting))


def _next(texts: list[str] | None) -> str | None:
    return texts.pop(0) if texts else None
