"""Tools of Anthropic's requests: those that the client runs are offered, hosted ones are left out.

Tools that Anthropic has by a type, but the client runs, are offered as functions with the input that
Anthropic documents for them.
"""

import re
from collections.abc import Mapping
from typing import Any

from gateway.conversation.bodies import Wire
from gateway.conversation.ignored import IgnoredParts
from gateway.rest.schemas.base import JsonObject, Name
from gateway.rest.schemas.messages import ToolBody, ToolFunctionBody
from kvrecall.domain.errors import InvalidRequest

_VERSION = re.compile(r"_\d{8}$")
_TEXT: JsonObject = {"type": "string"}
_RANGE: JsonObject = {"type": "array", "items": {"type": "integer"}}


def _commands(names: list[str], **members: JsonObject) -> JsonObject:
    """Return the schema of a tool with commands."""
    command = {"type": "string", "enum": names}
    properties = {"command": command, "path": _TEXT, **members}
    return {"type": "object", "properties": properties, "required": ["command"]}


_EDITING: Mapping[str, JsonObject] = {
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": _RANGE,
}
# Tools of the client by their types without a version: description and input.
_CLIENT_TOOLS: Mapping[str, tuple[str, JsonObject]] = {
    "bash": (
        "Run a command in a bash shell that keeps its state; restart it with restart.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "View, create and edit text files.",
        _commands(["view", "create", "str_replace", "insert"], **_EDITING),
    ),
    "memory": (
        "View, create, edit, delete and rename files of a memory that stays between conversations.",
        _commands(
            ["view", "create", "str_replace", "insert", "delete", "rename"],
            **_EDITING,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}
# Tools that Anthropic runs, or that need a model that sees: by their types without a version.
HOSTED_TOOLS = frozenset(
    {
        "advisor",
        "browser_toolset",
        "code_execution",
        "computer",
        "computer_toolset",
        "mcp_toolset",
        "tool_search_tool_bm25",
        "tool_search_tool_regex",
        "web_fetch",
        "web_search",
    }
)


class ToolWire(Wire):
    """Tool: of the client's own with its input, or one that Anthropic has by its type."""

    name: Name | None = None
    type: str | None = None
    description: str | None = None
    input_schema: JsonObject | None = None
    strict: bool | None = None
    cache_control: JsonObject | None = None

    def to_body(self, field: str, ignored: IgnoredParts) -> ToolBody | None:
        """Convert to the tool that a session has, as OpenAI's API would name it.

        None for a hosted one, which is noted. Raises InvalidRequest for an unknown type.
        """
        kind = _VERSION.sub("", self.type or "custom")
        if kind == "custom":
            return self._build(field, self.description, self.input_schema)
        if kind in _CLIENT_TOOLS:
            return self._build(field, *_CLIENT_TOOLS[kind])
        if kind not in HOSTED_TOOLS:
            wanted = ", ".join(["custom", *_CLIENT_TOOLS, *sorted(HOSTED_TOOLS)])
            message = f"tools of type {self.type!r} are not known; expected one of {wanted}"
            raise InvalidRequest(f"{field}.type", message)
        ignored.note(field, self.type or "")
        return None

    def _build(self, field: str, description: str | None, schema: JsonObject | None) -> ToolBody:
        for member, value in (("name", self.name), ("input_schema", schema)):
            if value is None:
                raise InvalidRequest(f"{field}.{member}", "Field required")
        function: dict[str, Any] = {"name": self.name, "parameters": schema}
        if description is not None:
            function["description"] = description
        if self.strict is not None:
            function["strict"] = self.strict
        return ToolBody(function=ToolFunctionBody.model_validate(function))
