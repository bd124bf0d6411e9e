"""Items of calls and of their outputs, one form per type of tool, and the calls that they stand for.

All of them are calls of functions to the model (`gateway.openai.responses.tools`). An item that
comes back stands for the same call as the one that it was built from, so its session is found.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import AliasChoices, Field

from gateway.conversation.bodies import CallId, Wire
from gateway.openai.custom_tools import read_input, write_arguments
from gateway.openai.responses.tools import Toolbox, flatten
from gateway.rest.schemas.base import Name
from kvrecall.domain.messages import ToolCall, json_object

Json = dict[str, Any]
OUTPUTS: Mapping[str, str] = {
    kind: f"{kind}_output"
    for kind in (
        "function_call",
        "custom_tool_call",
        "shell_call",
        "local_shell_call",
        "apply_patch_call",
    )
} | {"tool_search_call": "tool_search_output"}
"""Types of the items of calls, and of those of their outputs."""

# OpenAI names the call of some items by `id`.
_CALL_ID = AliasChoices("call_id", "id")


class FunctionCallItem(Wire):
    """Call of a function that the model asked for."""

    call_id: CallId
    name: Name
    namespace: Name | None = None
    arguments: str = "{}"

    @property
    def call(self) -> ToolCall:
        """The call."""
        name = flatten(self.name, self.namespace)
        return ToolCall(self.call_id, name, self.arguments or "{}")


class CustomCallItem(Wire):
    """Call of a tool that takes a text."""

    call_id: CallId
    name: Name
    namespace: Name | None = None
    input: str

    @property
    def call(self) -> ToolCall:
        """The call."""
        name = flatten(self.name, self.namespace)
        return ToolCall(self.call_id, name, write_arguments(self.input))


class ShellCallItem(Wire):
    """Call of a shell with commands."""

    call_id: CallId
    action: Json

    @property
    def call(self) -> ToolCall:
        """The call."""
        return _to_call(self.call_id, "shell", _drop_empty(self.action))


class LocalShellCallItem(Wire):
    """Call of a program with its arguments."""

    call_id: CallId = Field(validation_alias=_CALL_ID)
    action: Json

    @property
    def call(self) -> ToolCall:
        """The call."""
        action = {name: value for name, value in self.action.items() if name != "type"}
        return _to_call(self.call_id, "local_shell", _drop_empty(action))


class ApplyPatchCallItem(Wire):
    """Change of one file."""

    call_id: CallId
    operation: Json

    @property
    def call(self) -> ToolCall:
        """The call."""
        return _to_call(self.call_id, "apply_patch", self.operation)


class ToolSearchCallItem(Wire):
    """Search for tools that the client runs."""

    call_id: CallId = Field(validation_alias=_CALL_ID)
    arguments: Any = None

    @property
    def call(self) -> ToolCall:
        """The call."""
        arguments = self.arguments if isinstance(self.arguments, dict) else {}
        return _to_call(self.call_id, "tool_search", arguments)


class OutputItem(Wire):
    """Output of a call: text or parts."""

    call_id: CallId
    output: str | list[Json]

    @property
    def content(self) -> str | list[Json]:
        """The text that the model reads, or its parts."""
        return self.output


class LocalShellOutputItem(Wire):
    """Output of a program."""

    call_id: CallId = Field(validation_alias=_CALL_ID)
    output: str

    @property
    def content(self) -> str:
        """The text that the model reads."""
        return self.output


class ShellOutputItem(Wire):
    """Output of shell commands, each with its end."""

    call_id: CallId
    output: list[Json]

    @property
    def content(self) -> str:
        """The text that the model reads."""
        return json.dumps({"output": [_drop_empty(each) for each in self.output]})


class ApplyPatchOutputItem(Wire):
    """What came of a change of a file."""

    call_id: CallId
    status: str
    output: str | None = None

    @property
    def content(self) -> str:
        """The text that the model reads."""
        return json.dumps(_drop_empty({"status": self.status, "output": self.output}))


class ToolSearchOutputItem(Wire):
    """Tools that a search found: they are offered from here on."""

    call_id: CallId = Field(validation_alias=_CALL_ID)
    tools: list[Json]

    @property
    def content(self) -> str:
        """The text that the model reads."""
        names = [str(tool.get("name") or tool.get("type")) for tool in self.tools]
        return json.dumps({"tools": names})


CallItem = (
    FunctionCallItem
    | CustomCallItem
    | ShellCallItem
    | LocalShellCallItem
    | ApplyPatchCallItem
    | ToolSearchCallItem
)
ResultItem = (
    OutputItem
    | LocalShellOutputItem
    | ShellOutputItem
    | ApplyPatchOutputItem
    | ToolSearchOutputItem
)


def build_call(call: ToolCall, toolbox: Toolbox, id: str, status: str = "completed") -> Json:
    """Build the item of a call: of the type that its tool asks for, else that of a function."""
    tool = toolbox.find(call.name)
    head = {"id": id, "status": status, "call_id": call.id}
    if tool is None:
        return head | {"type": "function_call", "name": call.name, "arguments": call.arguments}
    names = {"name": tool.name} | ({} if tool.namespace is None else {"namespace": tool.namespace})
    return {"id": id, "type": tool.kind, "status": status, "call_id": call.id} | _BUILDERS[
        tool.kind
    ](call, names)


def build_output(kind: str, call: str, text: str, id: str) -> Json:
    """Build the item of a call's output from the text that the model has read."""
    head = {"id": id, "type": kind, "status": "completed", "call_id": call}
    if kind == "tool_search_output":
        return head | {"execution": "client", "tools": []}
    if kind in ("shell_call_output", "apply_patch_call_output"):
        return head | {"output": []} | (json_object(text) or {})
    return head | {"output": text}


def get_kind(call: ToolCall, toolbox: Toolbox) -> str:
    """Return the type of the item of a call."""
    tool = toolbox.find(call.name)
    return "function_call" if tool is None else tool.kind


def _build_function(call: ToolCall, names: Json) -> Json:
    return names | {"arguments": call.arguments}


def _build_custom(call: ToolCall, names: Json) -> Json:
    return names | {"input": read_input(call.arguments)}


def _build_shell(call: ToolCall, names: Json) -> Json:
    action: Json = {"commands": [], "timeout_ms": None, "max_output_length": None}
    return {"action": action | _read(call), "environment": {"type": "local"}}


def _build_local_shell(call: ToolCall, names: Json) -> Json:
    optional = dict.fromkeys(("timeout_ms", "user", "working_directory"))
    return {"action": {"type": "exec", "command": [], "env": {}} | optional | _read(call)}


def _build_apply_patch(call: ToolCall, names: Json) -> Json:
    return {"operation": {"type": "update_file", "path": ""} | _read(call)}


def _build_tool_search(call: ToolCall, names: Json) -> Json:
    return {"execution": "client", "arguments": _read(call)}


_BUILDERS: Mapping[str, Callable[[ToolCall, Json], Json]] = {
    "function_call": _build_function,
    "custom_tool_call": _build_custom,
    "shell_call": _build_shell,
    "local_shell_call": _build_local_shell,
    "apply_patch_call": _build_apply_patch,
    "tool_search_call": _build_tool_search,
}


def _read(call: ToolCall) -> Json:
    return json_object(call.arguments) or {}


def _to_call(id: str, name: str, arguments: Json) -> ToolCall:
    return ToolCall(id, name, json.dumps(arguments, ensure_ascii=False))


def _drop_empty(members: Json) -> Json:
    """Leave out what was only there to be given back: null, and an empty environment."""
    return {name: value for name, value in members.items() if value not in (None, {})}
