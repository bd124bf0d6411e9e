"""The events of a call's item between its beginning and its end, one form per type of item."""

from collections.abc import Iterator
from typing import Any

from gateway.openai.custom_tools import InputGrowth

Json = dict[str, Any]

GROWING = frozenset({"function_call", "custom_tool_call"})
"""Types of items that are told while their arguments arrive."""

_FUNCTION = "response.function_call_arguments"
_CUSTOM = "response.custom_tool_call_input"
_SHELL = "response.shell_call_command"


def begin_item(item: Json) -> Json:
    """Return the item of a call as it begins."""
    begun = item | {"status": "in_progress"}
    match item["type"]:
        case "function_call":
            return begun | {"arguments": ""}
        case "custom_tool_call":
            return begun | {"input": ""}
        case "shell_call":
            return begun | {"action": item["action"] | {"commands": []}}
    return begun


class CallGrowth:
    """What tells with which text a call's item is filled, while its arguments arrive in pieces."""

    def __init__(self, item: Json) -> None:
        """Begin with the item as it begins."""
        self._kind = item["type"]
        self._id = item["id"]
        self._input = InputGrowth()

    def add(self, piece: str) -> Iterator[tuple[str, Json]]:
        """Yield the types and members of the events of a piece."""
        if self._kind == "function_call" and piece:
            yield f"{_FUNCTION}.delta", {"item_id": self._id, "delta": piece}
        elif self._kind == "custom_tool_call":
            yield from self._tell_input(self._input.add(piece))

    def end(self, item: Json) -> Iterator[tuple[str, Json]]:
        """Yield the types and members of the events that come before the item's end."""
        match item["type"]:
            case "function_call":
                members = {"name": item["name"], "arguments": item["arguments"]}
                yield f"{_FUNCTION}.done", {"item_id": self._id, **members}
            case "custom_tool_call":
                yield from self._tell_input(self._input.end(item["input"]))
                yield f"{_CUSTOM}.done", {"item_id": self._id, "input": item["input"]}
            case "shell_call":
                for index, command in enumerate(item["action"]["commands"]):
                    yield f"{_SHELL}.added", {"command_index": index, "command": ""}
                    yield f"{_SHELL}.delta", {"command_index": index, "delta": command}
                    yield f"{_SHELL}.done", {"command_index": index, "command": command}

    def _tell_input(self, text: str) -> Iterator[tuple[str, Json]]:
        if text:
            yield f"{_CUSTOM}.delta", {"item_id": self._id, "delta": text}
