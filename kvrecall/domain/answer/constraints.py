"""What an answer may be: JSON of a schema, calls of some tools, no calls, or free text."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Between two parts of JSON: a space, or a line break with an indent. A weak model would go on with
# white space until the limit, if it could.
_SPACE = r"( |\n {0,12})?"

UNGUIDED_CALLS = frozenset({"response_template"})
"""The forms of calls (`WorkerInfo.call_format`) that are known to be read only: no grammar holds them."""

TAGGED_CALLS = frozenset({"qwen-xml", "glm", "minimax"})
"""The forms of calls in which each argument is between tags, and one that is text as it is."""

KEYED_CALLS = frozenset({"lfm2", "olmo"})
"""The forms of calls in which each argument is JSON behind its key."""

RAW_CALLS = frozenset({"gemma", "function-gemma"})
"""The forms of calls whose texts are raw between marks of their own, in arrays and objects as well."""

TEXT_GRAMMAR = "x-grammar"
"""Keyword of a text's schema: the grammar that the text follows, in Lark's syntax."""


class ToolChoice(StrEnum):
    """Whether an answer may call tools, or has to."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True)
class Constraint:
    """What an answer may be; the default leaves the choice to the model.

    - `schema`: JSON text of the schema that the answer's text follows, if it calls no tool; empty:
      free text.
    - `strict`: a keyword of the schema that is not supported is refused, else it is ignored.
    - `tools`: names of the tools that may be called; empty: all of the session's.
    - `single_call`: at most one call.
    - `grammar`: Lark's text of the grammar that the answer's text follows, instead of a schema;
      empty: none.
    """

    schema: str = ""
    strict: bool = False
    tool_choice: ToolChoice = ToolChoice.AUTO
    tools: tuple[str, ...] = ()
    single_call: bool = False
    grammar: str = ""


FREE = Constraint()


def to_grammar_schema(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """Return a schema with the options of llguidance that gateway and worker compile it with."""
    return {**schema, "x-guidance": {"whitespace_pattern": _SPACE, "lenient": not strict}}


def get_tool(text: str) -> tuple[str, dict[str, Any], bool]:
    """Read a tool's JSON text: its name, the schema of its arguments, and whether it is strict."""
    tool = json.loads(text)
    function = tool.get("function", tool)
    parameters = function.get("parameters")
    schema = {"type": "object"} | (parameters if isinstance(parameters, dict) else {})
    return str(function.get("name", "")), schema, function.get("strict") is True


def find_text_grammar(schema: dict[str, Any]) -> tuple[str, str] | None:
    """Return a tool's one argument and its grammar, if that is a text that follows one."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or len(properties) != 1:
        return None
    ((name, value),) = properties.items()
    grammar = value.get(TEXT_GRAMMAR) if isinstance(value, dict) else None
    return (name, grammar) if isinstance(grammar, str) else None
