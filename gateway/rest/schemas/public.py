"""Public values, which are the client's dataclasses: built from the services' values, written as JSON."""

from dataclasses import Field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from pydantic import TypeAdapter


class PublicValue(Protocol):
    """Instance of a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


ValueT = TypeVar("ValueT", bound=PublicValue)


def copy_to(kind: type[ValueT], source: object, **given: Any) -> ValueT:
    """Build a public value of the `given` fields, and of the fields of the same name in `source`."""
    names = [field.name for field in fields(kind) if field.name not in given]
    return kind(**{name: getattr(source, name) for name in names}, **given)


def copy_optional(kind: type[ValueT], source: object | None) -> ValueT | None:
    """Build a public value of the fields of the same name in `source`; None for None."""
    return None if source is None else copy_to(kind, source)


def to_time(seconds: float | None) -> datetime | None:
    """Convert Unix seconds to a time; None, and the 0 of a time that was not stored, to None."""
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def to_json(value: PublicValue) -> bytes:
    """Convert a public value to the JSON of a response."""
    return _get_adapter(type(value)).dump_json(value)


def to_dict(value: PublicValue) -> dict[str, Any]:
    """Convert a public value to the members of a response; times stay times, lists are tuples."""
    members: dict[str, Any] = _get_adapter(type(value)).dump_python(value)
    return members


@cache
def _get_adapter(kind: type[PublicValue]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
