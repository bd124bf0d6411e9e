"""Messages, tool calls and sampling parameters."""

import json
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a JSON text stands for; None if it is no JSON, or no object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant asks for; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str

    @property
    def signal(self) -> str:
        """The text an early repair is conditioned on."""
        return f"{self.name} {self.arguments}"


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def size(self) -> int:
        """Bytes of everything in the message that reaches the model."""
        calls = sum(len((call.name + call.arguments).encode()) for call in self.tool_calls)
        return len(self.content.encode()) + calls


MIN_TEMPERATURE = 1e-5
"""Lower temperatures are greedy: their logits would leave the range of numbers."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one turn. top_p 1 and top_k 0 are off.

    A temperature under `MIN_TEMPERATURE` is greedy.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
