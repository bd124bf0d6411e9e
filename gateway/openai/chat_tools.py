"""Tools of a chat completion, and their choice, as the session has them: functions."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict

from gateway.conversation.bodies import Wire
from gateway.openai.custom_tools import build_custom_function, build_tool
from gateway.rest.schemas.base import Body, JsonObject, Name, report_one_error
from gateway.rest.schemas.messages import ToolBody, ToolFunctionBody
from kvrecall.domain.errors import InvalidRequest

_PLACE = re.compile(r"tools\[(\d+)\]\.function(\.\w+)?")


class ChatToolBody(Body):
    """Tool that the model may call: a function, or a custom tool, whose input is a text."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function", "custom"] = "function"
    function: ToolFunctionBody | None = None
    custom: JsonObject | None = None

    def to_body(self, field: str) -> ToolBody:
        """Convert to the tool that a session has. Raises InvalidRequest for one that is none."""
        if self.type == "function":
            if self.function is None:
                raise InvalidRequest(f"{field}.function", "Field required")
            return ToolBody.model_validate(self.model_dump(exclude_unset=True, exclude={"custom"}))
        if self.custom is None:
            raise InvalidRequest(f"{field}.custom", "Field required")
        place = f"{field}.custom"
        return build_tool(build_custom_function(_flatten(self.custom), place), place)

    @property
    def custom_name(self) -> str:
        """The name of a custom tool; empty for a function."""
        return str((self.custom or {}).get("name")) if self.type == "custom" else ""


class FunctionName(Wire):
    """A function by its name."""

    name: Name


FunctionChoice = Annotated[
    Literal["none", "auto"] | FunctionName | None,
    report_one_error('expected "none", "auto" or {"name": ...}'),
]


def to_choice(choice: FunctionChoice) -> str | JsonObject | None:
    """Return the choice of a function as one of tools."""
    if isinstance(choice, FunctionName):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def name_functions(choice: Any) -> Any:
    """Return a choice of tools where custom ones are named as the functions that the model knows."""
    if not isinstance(choice, dict):
        return choice
    allowed = choice.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        tools = [name_functions(tool) for tool in allowed["tools"]]
        return {**choice, "allowed_tools": {**allowed, "tools": tools}}
    if choice.get("type") == "custom" and isinstance(choice.get("custom"), dict):
        return {"type": "function", "function": choice["custom"]}
    return choice


def get_tool_place(field: str, tools: Sequence[ChatToolBody]) -> str:
    """Return the place in the request of a field of the session's tools: functions without tools."""
    found = _PLACE.fullmatch(field)
    if found is None:
        return field
    index, member = int(found[1]), found[2] or ""
    if not tools:
        return f"functions[{index}]{member}"
    if not tools[index].custom_name:
        return field
    inner = ".format.grammar.definition" if member == ".parameters" else member
    return f"tools[{index}].custom{inner}"


def _flatten(tool: JsonObject) -> JsonObject:
    """Return a custom tool as responses write it, whose grammar is one level higher."""
    form = tool.get("format")
    if not isinstance(form, dict) or form.get("type") != "grammar":
        return tool
    grammar = form.get("grammar")
    return {**tool, "format": {"type": "grammar", **(grammar if isinstance(grammar, dict) else {})}}
