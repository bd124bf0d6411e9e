"""Conversion of decoded JSON to models: unknown fields are ignored, lists become tuples."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from kvrecall.client.exceptions import InvalidResponse

Model = TypeVar("Model")


def parse(model: type[Model], data: Any) -> Model:
    """Build a dataclass from a JSON object.

    Absent fields get their default. Raises InvalidResponse when a field without a default is
    absent, or when a value has the wrong shape.
    """
    if not isinstance(data, Mapping):
        raise InvalidResponse(f"expected a JSON object for {model.__name__}, got {data!r:.80}")
    kind: Any = model
    values = {}
    for name, hint in _get_hints(kind).items():
        if name in data:
            values[name] = _convert(hint, data[name], f"{model.__name__}.{name}")
        elif name in _get_required(kind):
            raise InvalidResponse(f"the response has no {model.__name__}.{name}")
    return model(**values)


@cache
def _get_hints(model: Any) -> dict[str, Any]:
    return get_type_hints(model)


@cache
def _get_required(model: Any) -> frozenset[str]:
    return frozenset(
        field.name
        for field in fields(model)
        if field.default is MISSING and field.default_factory is MISSING
    )


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Convert a JSON value to the type of a field; values of plain types are passed through."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        return value if value is None or len(kinds) > 1 else _convert(kinds[0], value, path)
    if origin is tuple:
        return _convert_list(get_args(hint)[0], value, path)
    if is_dataclass(hint):
        return parse(hint, value)  # type: ignore[arg-type]  # a class, as hints of fields are
    if hint is datetime:
        return _convert_datetime(value, path)
    return value


def _convert_list(kind: Any, value: Any, path: str) -> tuple[Any, ...]:
    """Convert a list; null is an empty one."""
    if not isinstance(value, list | NoneType):
        raise InvalidResponse(f"expected a list for {path}, got {value!r:.80}")
    return tuple(_convert(kind, item, path) for item in value or ())


def _convert_datetime(value: Any, path: str) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError) as error:
        raise InvalidResponse(f"expected a date for {path}, got {value!r:.80}") from error
