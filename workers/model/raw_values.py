"""Rules of the values of a schema in a form whose strings are raw, between marks of their own (Gemma's).

Keys are bare, numbers and words are JSON's, and there is no white space. What a schema says beyond
the keywords of `find_unheld` is ignored.
"""

import json
import re
from typing import Any

from kvrecall.domain.answer.constraints import TEXT_GRAMMAR
from kvrecall.domain.answer.held_schemas import KINDS, MAX_LEVELS, NUMBERS, get_kinds
from kvrecall.domain.answer.text_grammars import check_grammar, close_grammar
from workers.model.grammar_rules import Rules

_SEPARATOR = ","
_BARE_KEY = re.compile(r"[\w.-]+")
_ANY_KEY = "/[A-Za-z0-9_.-]+/"


class RawValues:
    """Rules of one tool's values.

    rules: what they are added to; quote: the mark before and behind a string; root: the tool's schema,
    whose definitions are referred to; strict: as of the tool.
    """

    def __init__(self, rules: Rules, quote: str, root: dict[str, Any], *, strict: bool) -> None:
        self._rules = rules
        self._quote = quote
        self._root = root
        self._strict = strict
        self._any = ""
        self._known: dict[str, str] = {}
        self._waiting: list[tuple[str, Any]] = []

    def add(self) -> str:
        """Add the rule of the tool's arguments; returns its name."""
        name = self._rules.add(self._add_object(self._root, 0))
        while self._waiting:
            referred, schema = self._waiting.pop()
            self._rules.define(referred, self._add(schema, 0))
        return name

    def _add(self, schema: Any, level: int) -> str:
        """Add the rule of a value; returns its name."""
        if not isinstance(schema, dict) or level > MAX_LEVELS:
            return self._add_any()
        if "$ref" in schema:
            return self._refer(str(schema["$ref"]))
        kinds = get_kinds(schema)
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and choices:
            fitting = [each for each in choices if not _get_kinds_of(each).isdisjoint(kinds)]
            return self._rules.add(" | ".join(map(self._write, fitting or choices)))
        several = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(several, list) and several:
            return self._rules.add(" | ".join(self._add(each, level + 1) for each in several))
        if len(kinds) == len(KINDS):
            return self._add_any()
        return self._rules.add(" | ".join(self._add_kind(kind, schema, level) for kind in kinds))

    def _add_any(self) -> str:
        """Add the rule of any value, once; returns its name."""
        if not self._any:
            self._any = self._rules.reserve()
            kinds = [self._add_kind(kind, {}, 0) for kind in KINDS if kind != "integer"]
            self._rules.define(self._any, " | ".join(kinds))
        return self._any

    def _refer(self, reference: str) -> str:
        """Name the rule of what a reference stands for; an unknown one stands for any value."""
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            return self._add_any()
        if reference not in self._known:
            self._known[reference] = self._rules.reserve()
            self._waiting.append((self._known[reference], found))
        return self._known[reference]

    def _add_kind(self, kind: str, schema: dict[str, Any], level: int) -> str:
        """Write the values of a type."""
        if kind == "string":
            return self._add_text(schema.get(TEXT_GRAMMAR))
        if kind == "array":
            return self._add_array(schema, level)
        if kind == "object":
            return self._add_object(schema, level)
        bounds = {key: schema[key] for key in NUMBERS & set(schema)} if kind != "null" else {}
        return self._rules.json({"type": kind, **bounds}, self._strict)

    def _add_text(self, grammar: Any) -> str:
        opening = self._rules.text(self._quote)
        if not isinstance(grammar, str):
            return f"{opening} {self._rules.any_until(self._quote)}"
        if self._quote in self._rules.special:
            check_grammar(grammar)
            return f"{opening} {self._rules.nest(grammar)} {opening}"
        return f"{opening} {self._rules.nest(close_grammar(grammar, self._quote))}"

    def _add_array(self, schema: dict[str, Any], level: int) -> str:
        item = self._add(schema.get("items"), level + 1)
        low, high = (_read_count(schema.get(name)) for name in ("minItems", "maxItems"))
        if high == 0:
            return self._rules.text("[]")
        more = f"({self._rules.text(_SEPARATOR)} {item})"
        most = "" if high is None else str(high - 1)
        items = f"{item} {more}{{{max((low or 0) - 1, 0)},{most}}}"
        return f"{self._rules.text('[')} {items if low else f'({items})?'} {self._rules.text(']')}"

    def _add_object(self, schema: dict[str, Any], level: int) -> str:
        """Write an object: its known members in the schema's order, or where none is known any."""
        properties = schema.get("properties")
        if isinstance(properties, dict) and properties:
            required = schema.get("required")
            named = required if isinstance(required, list) else []
            members = [
                (self._add_member(key, each, level), key in named)
                for key, each in properties.items()
            ]
            inner = self._rules.members(members, _SEPARATOR)
        elif schema.get("additionalProperties") is False:
            inner = ""
        else:
            value = self._add(schema.get("additionalProperties"), level + 1)
            member = f"{_ANY_KEY} {self._rules.text(':')} {value}"
            inner = f"({member} ({self._rules.text(_SEPARATOR)} {member})*)?"
        return f"{self._rules.text('{')} {inner} {self._rules.text('}')}"

    def _add_member(self, key: str, schema: Any, level: int) -> str:
        value = self._add(schema, level + 1)
        return self._rules.add(f"{self._write_key(key)} {self._rules.text(':')} {value}")

    def _write_key(self, key: str) -> str:
        return json.dumps(key) if _BARE_KEY.fullmatch(key) else self._write(key)

    def _write(self, value: Any) -> str:
        """Write one value."""
        text = self._rules.text
        if isinstance(value, str):
            return self._rules.framed(self._quote, value, self._quote)
        if isinstance(value, list):
            items = f" {text(_SEPARATOR)} ".join(map(self._write, value))
            return f"{text('[')} {items} {text(']')}"
        if isinstance(value, dict):
            members = f" {text(_SEPARATOR)} ".join(
                f"{self._write_key(key)} {text(':')} {self._write(each)}"
                for key, each in value.items()
            )
            return f"{text('{')} {members} {text('}')}"
        return json.dumps(json.dumps(value))


def _get_kinds_of(value: Any) -> set[str]:
    """Get the types that a schema may call a value."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        is_whole = isinstance(value, int) or value.is_integer()
        return {"number", "integer"} if is_whole else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array" if isinstance(value, list) else "object"}


def _read_count(value: Any) -> int | None:
    """Read a number of items; None where there is no bound."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
