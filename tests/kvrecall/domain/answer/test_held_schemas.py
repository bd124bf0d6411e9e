"""What a grammar of raw texts cannot hold is named by its path."""

from typing import Any

import pytest

from kvrecall.domain.answer.constraints import RAW_CALLS
from kvrecall.domain.answer.held_schemas import MAX_LEVELS, find_unheld, get_kinds

TEXT = {"type": "string"}


def nest(schema: dict[str, Any], levels: int) -> dict[str, Any]:
    """Put a schema into so many objects."""
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("call_format", sorted(RAW_CALLS))
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({}, ""),
        ({"properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}, ""),
        ({"properties": {"a": {"enum": [1, "b"], "description": "c"}}}, ""),
        ({"properties": {"a": {"type": "array", "items": TEXT, "maxItems": 3}}}, ""),
        ({"properties": {"a": {"type": ["integer", "null"], "minimum": 3}}}, ""),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": TEXT}}, ""),
        (nest(TEXT, MAX_LEVELS), ""),
        (nest({"not": {}}, 2), "properties.a.properties.a.not"),
        (nest(TEXT, MAX_LEVELS + 1), "properties.a." * (MAX_LEVELS + 1) + "type"),
        ({"properties": {"a": {**TEXT, "pattern": "b"}}}, "properties.a.pattern"),
        ({"properties": {"a": {**TEXT, "minimum": 3}}}, "properties.a.minimum"),
        ({"properties": {"a": {"items": {**TEXT, "format": "b"}}}}, "properties.a.items.format"),
        ({"properties": {"a": {"oneOf": [TEXT]}}}, "properties.a.oneOf"),
        ({"properties": {"a": {"anyOf": [{}, {"allOf": []}]}}}, "properties.a.anyOf.1.allOf"),
        ({"properties": {"a": {"anyOf": [], "type": "null"}}}, "properties.a.type"),
        ({"properties": {"a": {"enum": [1], "minimum": 0}}}, "properties.a.minimum"),
        ({"properties": {"a": {"$ref": "#/properties/b"}}}, "properties.a.$ref"),
        ({"properties": {}, "$defs": {"b": {"minLength": 3}}}, "$defs.b.minLength"),
        ({"properties": {"a": TEXT}, "required": ["b"]}, "required"),
        ({"properties": {"a": {**nest(TEXT, 1), "required": True}}}, "properties.a.required"),
        ({"minProperties": 1}, "minProperties"),
        ({"anyOf": [{}]}, "anyOf"),
    ],
)
def test_the_first_keyword_that_is_not_held(
    schema: dict[str, Any], path: str, call_format: str
) -> None:
    assert find_unheld(schema, call_format) == path


def test_json_is_held_to_whatever_the_compiler_takes() -> None:
    assert find_unheld({"minProperties": 1}, "hermes") == ""


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, ["string"]),
        ({"type": ["null", "integer"]}, ["integer", "null"]),
        ({"properties": {}}, ["object"]),
        ({"items": {}}, ["array"]),
    ],
)
def test_types_are_named_or_told_by_keywords(schema: dict[str, Any], kinds: list[str]) -> None:
    assert get_kinds(schema) == kinds
    assert len(get_kinds({})) == len(get_kinds({"type": "unknown"})) == 7
