"""Which keywords of a tool's schema calls can be held to, in forms that are no JSON."""

import re
from collections.abc import Iterator
from typing import Any

from kvrecall.domain.answer.constraints import KEYED_CALLS, RAW_CALLS, TAGGED_CALLS, TEXT_GRAMMAR

MAX_LEVELS = 32
"""Schemas within each other that a grammar of raw values follows; what is deeper may be any value."""

KINDS = ("string", "integer", "number", "boolean", "null", "array", "object")
"""The types of values."""

NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
"""Keywords of numbers: they are followed as in JSON."""

_DEFINITIONS = frozenset({"$defs", "definitions"})
_OBJECT = frozenset({"properties", "required", "additionalProperties"})
_NOTES = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples"})
# Keywords that a grammar of single arguments follows: of all together, and of one that is text as it is.
_OF_ALL = frozenset({"type"}) | _OBJECT | _DEFINITIONS
_OF_TEXT = frozenset({"type", "enum", "const", TEXT_GRAMMAR})
# Keywords that a grammar of raw values follows.
_OF_KINDS = {
    "string": frozenset({TEXT_GRAMMAR}),
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": _OBJECT,
}
_REFERENCE = re.compile(r"#/(\$defs|definitions)/[^/]+")


def find_unheld(schema: dict[str, Any], call_format: str) -> str:
    """Return a keyword of a tool's schema that calls of a form cannot be held to; empty if none is."""
    if call_format in RAW_CALLS:
        return next(_find_unheld_raw(schema, is_root=True), "")
    if call_format not in TAGGED_CALLS | KEYED_CALLS:
        return ""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    beside = sorted(set(schema) - _OF_ALL - _NOTES)
    if not set(schema.get("required") or ()) <= set(known):
        beside.append("required")
    for name, value in known.items() if call_format in TAGGED_CALLS else ():
        if isinstance(value, dict) and value.get("type") == "string":
            beside += [f"properties.{name}.{key}" for key in sorted(set(value) - _OF_TEXT - _NOTES)]
    return beside[0] if beside else ""


def get_kinds(schema: dict[str, Any]) -> list[str]:
    """Get the types that values of a schema may have; where it names none, its keywords tell."""
    named = schema.get("type")
    if named is None and not {"properties", "additionalProperties"}.isdisjoint(schema):
        return ["object"]
    if named is None and "items" in schema:
        return ["array"]
    kinds = named if isinstance(named, list) else [named]
    return [kind for kind in KINDS if kind in kinds] or list(KINDS)


def _find_unheld_raw(schema: Any, level: int = 0, *, is_root: bool = False) -> Iterator[str]:
    """Yield the paths of keywords that a grammar of raw values does not follow."""
    if not isinstance(schema, dict):
        return
    if level > MAX_LEVELS:
        yield from sorted(set(schema) - _NOTES)
        return
    yield from sorted(set(schema) - _NOTES - (_OF_ALL if is_root else _get_held(schema)))
    if "$ref" in schema and not _REFERENCE.fullmatch(str(schema["$ref"])):
        yield "$ref"
    properties = schema.get("properties")
    known = set(properties) if isinstance(properties, dict) else set()
    required = schema.get("required", [])
    if not isinstance(required, list) or not known.issuperset(required):
        yield "required"
    for name in ("items", "additionalProperties"):
        yield from (f"{name}.{path}" for path in _find_unheld_raw(schema.get(name), level + 1))
    for name in ("properties", "anyOf", *(sorted(_DEFINITIONS) if is_root else ())):
        for key, each in _list_parts(schema.get(name)):
            yield from (f"{name}.{key}.{path}" for path in _find_unheld_raw(each, level + 1))


def _list_parts(schemas: Any) -> list[tuple[Any, Any]]:
    """List the schemas of a keyword that has several, each with its name or number."""
    if isinstance(schemas, dict):
        return list(schemas.items())
    return list(enumerate(schemas)) if isinstance(schemas, list) else []


def _get_held(schema: dict[str, Any]) -> frozenset[str]:
    """Get the keywords that are followed in a schema: of its types, of a choice, or of a reference."""
    for alone in ("$ref", "anyOf"):
        if alone in schema:
            return frozenset({alone})
    if "const" in schema or "enum" in schema:
        return frozenset({"type", "const", "enum"})
    return frozenset({"type"}).union(*(_OF_KINDS.get(kind, ()) for kind in get_kinds(schema)))
