"""The events of a call's item between its beginning and its end, one form per type of item."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Json = dict[str, Any]


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


def tell_growth(item: Json) -> Iterator[tuple[str, Json]]:
    """Yield the types and members of the events that tell what a call's item is filled with."""
    tell = _TELLERS.get(item["type"])
    if tell is not None:
        yield from tell(item)


def _tell_function(item: Json) -> Iterator[tuple[str, Json]]:
    kind = "response.function_call_arguments"
    arguments = item["arguments"]
    yield f"{kind}.delta", {"item_id": item["id"], "delta": arguments}
    yield f"{kind}.done", {"item_id": item["id"], "name": item["name"], "arguments": arguments}


def _tell_custom(item: Json) -> Iterator[tuple[str, Json]]:
    kind = "response.custom_tool_call_input"
    yield f"{kind}.delta", {"item_id": item["id"], "delta": item["input"]}
    yield f"{kind}.done", {"item_id": item["id"], "input": item["input"]}


def _tell_shell(item: Json) -> Iterator[tuple[str, Json]]:
    kind = "response.shell_call_command"
    for index, command in enumerate(item["action"]["commands"]):
        yield f"{kind}.added", {"command_index": index, "command": ""}
        yield f"{kind}.delta", {"command_index": index, "delta": command}
        yield f"{kind}.done", {"command_index": index, "command": command}


_TELLERS: Mapping[str, Callable[[Json], Iterator[tuple[str, Json]]]] = {
    "function_call": _tell_function,
    "custom_tool_call": _tell_custom,
    "shell_call": _tell_shell,
}
