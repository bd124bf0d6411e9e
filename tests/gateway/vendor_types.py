"""The types that vendors' SDKs know: what is new in a later version shows as a row that is missing."""

import typing
from typing import Any

import typing_extensions
from pydantic import BaseModel


def get_types(union: Any) -> set[str]:
    """Return all values of the member `type` in a union of an SDK's typed dictionaries and models."""
    found = set(_find(union))
    assert found, f"no type in {union}"
    return found


def _find(union: Any) -> typing.Iterator[str]:
    if isinstance(union, type) and issubclass(union, BaseModel):
        yield from _get_literals(union.model_fields["type"].annotation)
    elif typing_extensions.is_typeddict(union):
        yield from _get_literals(typing.get_type_hints(union)["type"])
    else:
        for each in typing.get_args(union):
            yield from _find(each)


def _get_literals(hint: Any) -> typing.Iterator[str]:
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
    else:
        for each in typing.get_args(hint):
            yield from _get_literals(each)
