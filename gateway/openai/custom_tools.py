"""Custom tools, whose input is a text: to the model each is a function with one text argument."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.answer.constraints import TEXT_GRAMMAR
from kvrecall.domain.answer.text_grammars import regex_to_grammar
from kvrecall.domain.errors import InvalidRequest
from kvrecall.domain.messages import json_object

Json = dict[str, Any]
_INPUT = "input"


def build_custom_function(tool: Mapping[str, Any], field: str) -> Json:
    """Build the function that stands for a custom tool. Raises InvalidRequest for a bad format."""
    text: Json = {"type": "string"}
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        definition, syntax = form.get("definition"), form.get("syntax")
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            message = "a grammar has a definition and a syntax, which is lark or regex"
            raise InvalidRequest(f"{field}.format", message)
        text[TEXT_GRAMMAR] = regex_to_grammar(definition) if syntax == "regex" else definition
    elif form is not None and form != {"type": "text"}:
        message = f"{json.dumps(form)[:100]} is not a format; expected text or grammar"
        raise InvalidRequest(f"{field}.format", message)
    function = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    function["parameters"] = {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return function


def build_tool(function: Json, field: str) -> ToolBody:
    """Build the tool that a session has. Raises InvalidRequest with the member of `field`."""
    try:
        return ToolBody.model_validate({"type": "function", "function": function})
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"][1:])
        raise InvalidRequest(f"{field}.{path}", first["msg"]) from error


def write_arguments(text: str) -> str:
    """Return the arguments of a custom tool's call with this text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def read_input(arguments: str) -> str:
    """Return the text of a custom tool's call; all of it where a model wrote it otherwise.

    Of a call that was cut off it is the text so far.
    """
    found = json_object(arguments)
    if found is None:
        return _read_so_far(arguments) or arguments
    text = found.get(_INPUT)
    return text if isinstance(text, str) else arguments


class InputGrowth:
    """Growth of the text of a custom tool's call while its arguments arrive in pieces."""

    def __init__(self) -> None:
        self._arguments = ""
        self._sent = 0  # characters

    def add(self, piece: str) -> str:
        """Return the text that a piece of the arguments adds; empty if it adds none."""
        self._arguments += piece
        return self.end(_read_so_far(self._arguments))

    def end(self, text: str) -> str:
        """Return the part of the whole text that was not sent yet."""
        fresh = text[self._sent :]
        self._sent += len(fresh)
        return fresh


def _read_so_far(arguments: str) -> str:
    """Return the text of a call whose arguments go on."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""
