"""The form of an answer's text under the names that servers have for it: one constraint for all.

`response_format` is OpenAI's, `guided_...` and `structured_outputs` are vLLM's, `json_schema` and
`grammar` llama.cpp's. A request has one of them.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, Field

from gateway.rest.schemas.base import JsonObject
from kvrecall.domain.answer.constraints import Constraint
from kvrecall.domain.answer.text_grammars import check_grammar, regex_to_grammar
from kvrecall.domain.errors import InvalidRequest

_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_HEADER = "%llguidance {}"
_MAX_CHOICES = 1024


class FormOptions(BaseModel):
    """Members that say what the text of an answer is, beside `response_format`."""

    guided_json: str | JsonObject | None = Field(default=None, description="A JSON schema.")
    guided_regex: str | None = Field(default=None, description="A regular expression.")
    guided_choice: list[str] | None = Field(default=None, description="Texts, of which it is one.")
    guided_grammar: str | None = Field(default=None, description="A grammar, as Lark or GBNF.")
    structured_outputs: JsonObject | None = Field(
        default=None, description=f"One of {', '.join(_KINDS)}."
    )
    json_schema: str | JsonObject | None = Field(default=None, description="A JSON schema.")
    grammar: str | None = Field(default=None, description="A grammar, as GBNF or Lark.")

    def hold_to_form(self, constraint: Constraint, formatted: str) -> Constraint:
        """Return the constraint with the form that these members ask for, if they do.

        `formatted`: the member that has asked for one already; empty if none has. Raises
        InvalidRequest for two of them, and for one that is none.
        """
        given = list(self._find_given())
        names = [*([formatted] if formatted else []), *(name for name, _, _ in given)]
        if len(names) > 1:
            message = f"{names[0]} and {names[1]} exclude each other; send one of them"
            raise InvalidRequest(names[1], message)
        for name, kind, value in given:
            schema, grammar = _read(name, kind, value)
            return replace(constraint, schema=schema, grammar=grammar)
        return constraint

    def _find_given(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the name, kind and value of each member that asks for a form."""
        for kind in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{kind}")) is not None:
                yield f"guided_{kind}", kind, value
        if self.json_schema is not None:
            yield "json_schema", "json", self.json_schema
        if self.grammar:
            yield "grammar", "grammar", self.grammar
        for kind, value in (self.structured_outputs or {}).items():
            name = f"structured_outputs.{kind}"
            if value is None or value is False:
                continue
            if kind not in _KINDS:
                message = f"{name} is not supported here; expected one of {', '.join(_KINDS)}"
                raise InvalidRequest(name, message, openai_code="unsupported_parameter")
            yield name, kind, value


def _read(name: str, kind: str, value: Any) -> tuple[str, str]:
    """Return the JSON text of a schema, or a grammar; the other one is empty."""
    match kind, value:
        case "json", _:
            return json.dumps(_read_schema(name, value)), ""
        case "json_object", True:
            return json.dumps({"type": "object"}), ""
        case "regex", str() if value:
            return "", regex_to_grammar(value)
        case "choice", list() if 0 < len(value) <= _MAX_CHOICES and all(map(_is_text, value)):
            return "", "start: " + " | ".join(map(json.dumps, value))
        case "grammar", str() if value:
            return "", _read_grammar(name, value)
    expected = {
        "json_object": "true",
        "regex": "a regular expression",
        "choice": f"a list of 1 to {_MAX_CHOICES} texts, none of them empty",
        "grammar": "the text of a grammar",
    }
    raise InvalidRequest(name, f"{name} is {expected[kind]}")


def _read_schema(name: str, value: Any) -> JsonObject:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise InvalidRequest(name, f"{name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(name, f"{name} is a JSON schema: an object, or its text")
    return value


def _read_grammar(name: str, text: str) -> str:
    """Return a grammar in Lark's syntax; one of llama.cpp's is translated."""
    try:
        grammar = any_to_lark(text).replace(_HEADER, "", 1)
        check_grammar(grammar)
    except Exception as error:  # the translation raises no narrower one
        raise InvalidRequest(name, f"the grammar cannot be read: {error}") from error
    return grammar


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
