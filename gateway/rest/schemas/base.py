"""Base class and shared types of the request bodies."""

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from kvrecall.domain.settings.session import MAX_CACHE_SALT, MAX_MEMORY_NAME

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT)]
MemoryName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_MEMORY_NAME)]
JsonObject = dict[str, Any]
MetadataBody = Annotated[
    dict[Name, Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=32)
]
StopStrings = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=1024)]], Field(max_length=128)
]
# Seeds are signed 64-bit integers in the catalog.
MAX_SEED = 2**63 - 1
_STOPS_SCHEMA: JsonObject = {
    "anyOf": [
        {"type": "string", "maxLength": 1024},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": 1024},
            "maxItems": 128,
        },
        {"type": "null"},
    ]
}


def _list_stops(value: Any) -> Any:
    """Return the one string that ends an answer as a list; none for an empty one."""
    return ([value] if value else None) if isinstance(value, str) else value


def _drop_minus_one(value: Any) -> Any:
    """Return None for -1, with which vLLM's, llama.cpp's and LM Studio's clients name no number."""
    return None if isinstance(value, int) and value == -1 else value


def _read_all(value: Any) -> Any:
    """Return 0 for -1: both take all tokens."""
    return 0 if isinstance(value, int) and value == -1 else value


def _or_minus_one(least: int, below: int) -> WithJsonSchema:
    number = {"type": "integer", "minimum": least, "exclusiveMaximum": below}
    return WithJsonSchema({"anyOf": [number, {"const": -1}, {"type": "null"}]})


Stops = Annotated[StopStrings | None, BeforeValidator(_list_stops), WithJsonSchema(_STOPS_SCHEMA)]
"""A string that ends an answer, or several."""
Length = Annotated[
    Annotated[int, Field(ge=1, lt=2**31)] | None,
    BeforeValidator(_drop_minus_one),
    _or_minus_one(1, 2**31),
]
"""The most tokens of an answer; -1 as null."""
TopK = Annotated[
    Annotated[int, Field(ge=0, lt=2**31)] | None,
    BeforeValidator(_read_all),
    _or_minus_one(0, 2**31),
]
"""Likeliest tokens to sample among; 0 and -1: all."""
Seed = Annotated[
    Annotated[int, Field(ge=0, le=MAX_SEED)] | None,
    BeforeValidator(_drop_minus_one),
    _or_minus_one(0, MAX_SEED + 1),
]
"""A sampling seed; -1 as null: any."""


def report_one_error(expected: str) -> WrapValidator:
    """Report one error for a field of a union type, which reports one for each of its members."""

    def merge(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(value)
        except ValidationError as error:
            raise ValueError(expected) from error

    return WrapValidator(merge)


class Body(BaseModel):
    """Request body: unknown fields are rejected, and values are not coerced."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
