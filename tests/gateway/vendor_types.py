"""The types that vendors' SDKs know: what is new in a later version shows as a row that is missing."""

import typing
from typing import Any

from pydantic import BaseModel


def get_types(union: Any) -> set[str]:
    """Return all values of the member `type` in a union of an SDK's typed dictionaries and models."""
    inner = typing.get_args(union)
    if inner and typing.get_origin(union) is not typing.Literal:
        return set().union(*(get_types(each) for each in inner if not isinstance(each, str)))
    if isinstance(union, type) and issubclass(union, BaseModel):
        return set(typing.get_args(union.model_fields["type"].annotation))
    if typing.is_typeddict(union):
        return _get_literals(typing.get_type_hints(union)["type"])
    return set()


def _get_literals(hint: Any) -> set[str]:
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    return set().union(*(_get_literals(each) for each in typing.get_args(hint)))
