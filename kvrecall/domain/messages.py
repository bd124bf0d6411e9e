"""What is said in a session: messages and tool calls as plain values, and how they cross the wire."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from kvrecall.protocol.v1 import worker_pb2 as wire

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


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy; top_p 0 and top_k 0 are off."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()


def message_to_wire(message: Message) -> wire.Message:
    """The message as a worker reads it."""
    return wire.Message(
        role=message.role,
        content=message.content,
        tool_calls=[call_to_wire(call) for call in message.tool_calls],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def message_from_wire(message: wire.Message) -> Message:
    """The message that a worker gave."""
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=tuple(call_from_wire(call) for call in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def call_to_wire(call: ToolCall) -> wire.ToolCall:
    """The tool call as a worker reads it."""
    return wire.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def call_from_wire(call: wire.ToolCall) -> ToolCall:
    """The tool call that a worker parsed."""
    return ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def sampling_to_wire(sampling: Sampling) -> wire.Sampling:
    """The sampling parameters as a worker reads them."""
    return wire.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=sampling.stop,
    )
