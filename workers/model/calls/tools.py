"""What calls have to know of the tools: names, and the schemas of their parameters."""

from collections.abc import Sequence
from typing import Any


def get_name(tool: Any) -> str:
    """Return the name of a tool; an empty one if there is none."""
    return str(_get_function(tool).get("name", ""))


def get_parameters(tools: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool's parameters; an empty one if there is none."""
    for tool in map(_get_function, tools):
        if tool.get("name") == name and isinstance(tool.get("parameters"), dict):
            parameters: dict[str, Any] = tool["parameters"]
            return parameters
    return {}


def get_property(tools: Sequence[Any], name: str, key: str) -> dict[str, Any]:
    """Return the schema of one parameter of a tool; an empty one if there is none."""
    properties = get_parameters(tools, name).get("properties")
    found = properties.get(key) if isinstance(properties, dict) else None
    return found if isinstance(found, dict) else {}


def is_text(schema: dict[str, Any]) -> bool:
    """Return whether a parameter's value is written as it is: text that is not one of a choice."""
    return schema.get("type") == "string"


def _get_function(tool: Any) -> dict[str, Any]:
    found = tool.get("function", tool) if isinstance(tool, dict) else {}
    return found if isinstance(found, dict) else {}
