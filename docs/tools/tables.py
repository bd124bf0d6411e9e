"""Markdown tables, and types in the words that the command line uses."""

from collections.abc import Iterable, Sequence
from enum import EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr

TYPES: dict[Any, str] = {
    str: "text",
    SecretStr: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
}


def to_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with escaped cells; an empty string where there are no rows."""
    lines = [f"| {' | '.join(to_cell(cell) for cell in row)} |" for row in rows]
    if not lines:
        return ""
    head = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*head, *lines]) + "\n"


def to_cell(text: str) -> str:
    """Text on one line, with the column separator escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def describe_type(annotation: Any) -> str:
    """A Python type in words, without `None`; the values of a literal."""
    kind, arguments = get_origin(annotation), get_args(annotation)
    if kind is Annotated:
        return describe_type(arguments[0])
    if kind in (Union, UnionType):
        return " or ".join(describe_type(each) for each in arguments if each is not NoneType)
    if kind is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if isinstance(annotation, EnumType):
        return ", ".join(f"`{member.value}`" for member in annotation)
    if kind in (list, tuple):
        return f"{describe_type(arguments[0])}, repeatable"
    return TYPES.get(annotation) or getattr(annotation, "__name__", str(annotation)).lower()
