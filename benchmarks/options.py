"""Options of a benchmark: the fields of a frozen dataclass, read from the command line."""

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, Field, field, fields
from types import UnionType
from typing import Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints


class Plan(Protocol):
    """Instance of a dataclass whose fields are options."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


PlanT = TypeVar("PlanT", bound=Plan)


def option(default: Any, help_text: str = "", choices: Sequence[str] = ()) -> Any:
    """A field of a plan with a help text and, for texts, the values that it may have."""
    return field(default=default, metadata={"help": help_text, "choices": choices})


def add_options(parser: argparse.ArgumentParser, plan: type[Plan]) -> None:
    """Add an option for each field of the plan; a field without default is required."""
    types = get_type_hints(plan)
    for each in fields(plan):
        kind, many = value_type(types[each.name])
        parser.add_argument(
            f"--{each.name.replace('_', '-')}",
            required=each.default is MISSING,
            help=describe(each),
            default=argparse.SUPPRESS,
            **keywords(each, kind, many),
        )


def keywords(each: "Field[Any]", kind: Any, many: bool) -> dict[str, Any]:
    """Arguments of `add_argument` for a field's type."""
    if kind is bool:
        return {"action": "store_true"}
    choices = {"choices": tuple(given)} if (given := each.metadata.get("choices")) else {}
    several = {"nargs": "+", "action": "extend"} if many else {}
    return {"type": kind, **choices, **several}


def value_type(hint: Any) -> tuple[Any, bool]:
    """The type of a field's value, and whether the field is a tuple of such values."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True
    if isinstance(hint, UnionType):
        return next(each for each in get_args(hint) if each is not type(None)), False
    return hint, False


def describe(each: "Field[Any]") -> str:
    """The help text of a field, with its default."""
    text = str(each.metadata.get("help", ""))
    if each.default in (MISSING, None, False, ()):
        return text
    shown = f"default: {' '.join(map(str, each.default)) if isinstance(each.default, tuple) else each.default}"
    return f"{text}; {shown}" if text else shown


def read_plan(plan: type[PlanT], given: argparse.Namespace) -> PlanT:
    """The plan of parsed options; those that were not given have their defaults."""
    names = {each.name for each in fields(plan)}
    values = {name: value for name, value in vars(given).items() if name in names}
    return plan(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
