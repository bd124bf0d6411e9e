"""Tools of a request: what of them the model is offered, and how its calls are told from each other.

The client runs all tools. Each is a function to the model, whatever its type: a custom tool has one
text argument, and the functions of a namespace have its name in front of theirs. Tools that only
OpenAI could run are left out.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.openai.custom_tools import build_custom_function, build_tool
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.tolerance.ignored import Ignored

Json = dict[str, Any]

HOSTED_TOOLS = frozenset(
    {
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "mcp",
        "programmatic_tool_calling",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Types of tools that OpenAI runs by itself."""

_TEXT = {"type": "string"}
_LOCAL_SHELL: Json = {
    "name": "local_shell",
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": _TEXT,
                "description": "The program and its arguments.",
            },
            "working_directory": {**_TEXT, "description": "Where to run it."},
            "timeout_ms": {"type": "integer", "description": "The longest it may take."},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
_SHELL: Json = {
    "name": "shell",
    "description": "Runs shell commands on the user's machine and returns their output.",
    "parameters": {
        "type": "object",
        "properties": {
            "commands": {
                "type": "array",
                "items": _TEXT,
                "description": "Shell commands, which run one after the other.",
            },
            "timeout_ms": {"type": "integer", "description": "The longest they may take."},
            "max_output_length": {
                "type": "integer",
                "description": "The most characters of output to return.",
            },
        },
        "required": ["commands"],
        "additionalProperties": False,
    },
}
_APPLY_PATCH: Json = {
    "name": "apply_patch",
    "description": "Creates, updates or deletes one file. A diff has a line '@@' with the nearest "
    "enclosing definition before each place that changes, then lines that begin with a space where "
    "they stay, '-' where they go, and '+' where they are new; of a new file all lines begin "
    "with '+'.",
    "parameters": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {**_TEXT, "description": "The file, relative to the workspace."},
            "diff": {**_TEXT, "description": "What changes; not for a file to delete."},
        },
        "required": ["type", "path"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the model is offered.

    `body`: the function as the session has it; `kind`: the type of the items of its calls; `name`
    and `namespace`: by which the client knows it; `field`: its place in the request.
    """

    body: ToolBody
    kind: str
    name: str
    namespace: str | None
    field: str


@dataclass(frozen=True)
class Toolbox:
    """The tools that the model is offered, by the names that it knows them by.

    `left_out`: places and types of those that it is not.
    """

    offered: Mapping[str, OfferedTool]
    left_out: tuple[Ignored, ...] = ()

    @property
    def bodies(self) -> list[ToolBody]:
        """The tools as a session has them."""
        return [tool.body for tool in self.offered.values()]

    def find(self, session_name: str) -> OfferedTool | None:
        """Return the tool that the model knows by this name; None for another's."""
        return self.offered.get(session_name)

    def find_place(self, index: int, member: str) -> str:
        """Return the place in the request of a member of a session's tool, by the tool's number."""
        tool = list(self.offered.values())[index]
        if tool.kind == "custom_tool_call" and member == "parameters":
            member = "format.definition"
        return f"{tool.field}.{member}"

    def choose(self, choice: object) -> tuple[Any, tuple[Ignored, ...]]:
        """Return a choice of tools by the names that the model knows, and what is left out of it.

        Raises InvalidRequest for a tool that is not there.
        """
        if isinstance(choice, str):
            if choice == "required" and self.left_out and not self.offered:
                return "auto", (Ignored("tool_choice"),)
            return choice, ()
        if not isinstance(choice, dict):
            return choice, ()
        if choice.get("type") != "allowed_tools":
            names = self._resolve(choice)
            if names is None:
                return "auto", (Ignored("tool_choice"),)
            (name,) = names if len(names) == 1 else (str(choice.get("name")),)
            return {"type": "function", "name": name}, ()
        tools = choice.get("tools")
        if not isinstance(tools, list):
            return choice, ()
        found = [self._resolve(tool) if isinstance(tool, dict) else [] for tool in tools]
        left_out = tuple(
            Ignored(f"tool_choice.tools[{index}]")
            for index, names in enumerate(found)
            if names is None
        )
        names = [name for each in found for name in each or ()]
        if tools and not names and left_out:
            return "none", left_out
        functions = [{"type": "function", "name": name} for name in names]
        return {**choice, "tools": functions}, left_out

    def _resolve(self, named: Json) -> list[str] | None:
        """Return the names of the tools that a choice names; None for one that is left out."""
        kind, name, namespace = named.get("type"), named.get("name"), named.get("namespace")
        if kind in HOSTED_TOOLS:
            return None
        if kind == "namespace":
            return [key for key, tool in self.offered.items() if tool.namespace == name]
        if kind not in (None, "function", "custom"):
            name = kind  # a tool whose type is its name
        if not isinstance(name, str) or not name:
            raise InvalidRequest("tool_choice", f"{json.dumps(named)[:100]} names no tool")
        flat = flatten(name, namespace if isinstance(namespace, str) else None)
        if flat in self.offered:
            return [flat]
        within = [key for key, tool in self.offered.items() if tool.name == name]
        return within if len(within) == 1 else [flat]


def read_tools(tools: Iterable[tuple[str, Json]]) -> Toolbox:
    """Read tools with their places in the request. Raises InvalidRequest for a bad one.

    Of two by the same name the later one counts: a search for tools may find one that was there.
    """
    offered: dict[str, OfferedTool] = {}
    left_out: list[Ignored] = []
    for field, tool in tools:
        kind = tool.get("type") or "function"
        read = _READERS.get(kind) if isinstance(kind, str) else None
        found = [] if read is None or not _is_direct(tool) else list(read(tool, field))
        if not found:
            left_out.append(Ignored(field, str(kind)))
        offered |= {each.body.function.name: each for each in found}
    return Toolbox(offered, tuple(left_out))


def place_tools(tools: Sequence[Json]) -> Toolbox:
    """Read the tools that a response has given back."""
    return read_tools((f"tools[{index}]", tool) for index, tool in enumerate(tools))


def flatten(name: str, namespace: str | None) -> str:
    """Return the name of a function of a namespace for a model, as Codex writes it."""
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}" if namespace else name


def describe_tools(tools: Sequence[Json]) -> list[Json]:
    """Return the tools as a response gives them back, without those that are left out."""
    kept = [tool for tool in tools if read_tools([("tools", tool)]).offered]
    return [_describe(tool) for tool in kept]


def _describe(tool: Json) -> Json:
    if (tool.get("type") or "function") != "function":
        return tool
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict") is True,
    }


def _is_direct(tool: Json) -> bool:
    """Return whether the model may call a tool by itself, and not only a program that it writes."""
    callers = tool.get("allowed_callers")
    return not isinstance(callers, list) or not callers or "direct" in callers


def _read_function(tool: Json, field: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    yield _offer(function, "function_call", field, namespace)


def _read_custom(tool: Json, field: str, namespace: str | None = None) -> Iterator[OfferedTool]:
    function = build_custom_function(tool, field)
    yield _offer(function, "custom_tool_call", field, namespace)


def _read_namespace(tool: Json, field: str) -> Iterator[OfferedTool]:
    namespace, tools = tool.get("name"), tool.get("tools")
    if not isinstance(namespace, str) or not namespace:
        raise InvalidRequest(f"{field}.name", "a namespace has a name")
    if not isinstance(tools, list):
        raise InvalidRequest(f"{field}.tools", "a namespace has a list of tools")
    for index, inner in enumerate(tools):
        place = f"{field}.tools[{index}]"
        kind = inner.get("type", "function") if isinstance(inner, dict) else None
        read = {"function": _read_function, "custom": _read_custom}.get(kind or "")
        if read is None:
            raise InvalidRequest(place, "a namespace has functions and custom tools")
        if _is_direct(inner):
            yield from read(inner, place, namespace)


def _read_shell(tool: Json, field: str) -> Iterator[OfferedTool]:
    """Offer a shell that the client runs; one in a container of OpenAI's is left out."""
    environment = tool.get("environment")
    if environment is None or (isinstance(environment, dict) and environment["type"] == "local"):
        yield _offer(_SHELL, "shell_call", field)


def _read_local_shell(tool: Json, field: str) -> Iterator[OfferedTool]:
    yield _offer(_LOCAL_SHELL, "local_shell_call", field)


def _read_apply_patch(tool: Json, field: str) -> Iterator[OfferedTool]:
    yield _offer(_APPLY_PATCH, "apply_patch_call", field)


def _read_tool_search(tool: Json, field: str) -> Iterator[OfferedTool]:
    """Offer a search that the client runs; deferred tools of the request are all offered anyway."""
    if tool.get("execution") == "client":
        function = {"name": "tool_search", "description": tool.get("description") or ""}
        if isinstance(tool.get("parameters"), dict):
            function["parameters"] = tool["parameters"]
        yield _offer(function, "tool_search_call", field)


_READERS: Mapping[str, Callable[[Json, str], Iterator[OfferedTool]]] = {
    "function": _read_function,
    "custom": _read_custom,
    "namespace": _read_namespace,
    "shell": _read_shell,
    "local_shell": _read_local_shell,
    "apply_patch": _read_apply_patch,
    "tool_search": _read_tool_search,
}


def _offer(function: Json, kind: str, field: str, namespace: str | None = None) -> OfferedTool:
    name = function.get("name")
    if isinstance(name, str) and namespace:
        function = {**function, "name": flatten(name, namespace)}
    body = build_tool(function, field)
    return OfferedTool(body, kind, str(name), namespace, field)
