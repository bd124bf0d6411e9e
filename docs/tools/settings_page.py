"""The page of settings: every environment variable with its type, default and meaning."""

import inspect
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tables import describe_type, to_table

INTRODUCTION = """# Settings

Settings come from the environment; options of the [command line](cli.md) go before them. A nested
setting's name has two underscores between the parts: `KVRECALL_WORKER__BLOCK_TOKENS=256`. Unknown
names and values out of range are refused at start. [Operations](../operations.md) says which of
them matter and why.
"""


def build() -> str:
    """The page's text."""
    from kvrecall_server.app.settings import Settings

    prefix = str(Settings.model_config.get("env_prefix"))
    own = {name: f for name, f in Settings.model_fields.items() if not is_nested(f)}
    sections = [to_section("The process", "", own, prefix)]
    for name, field in Settings.model_fields.items():
        model = field.annotation
        if is_nested(field) and isinstance(model, type) and issubclass(model, BaseModel):
            text = inspect.cleandoc(model.__doc__ or "")
            nested = f"{prefix}{name.upper()}__"
            sections.append(to_section(f"`{nested}...`", text, model.model_fields, nested))
    return "\n".join([INTRODUCTION, *sections])


def is_nested(field: FieldInfo) -> bool:
    """True for a settings model of another package."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def to_section(title: str, text: str, fields: dict[str, FieldInfo], prefix: str) -> str:
    """A heading, the model's docstring and a table of its settings."""
    rows = [
        [
            f"`{prefix}{name.upper()}`",
            describe_field_type(field),
            describe_default(field.get_default(call_default_factory=True)),
            field.description or "",
        ]
        for name, field in fields.items()
    ]
    table = to_table(["setting", "type", "default", ""], rows)
    return f"## {title}\n\n{text}\n\n{table}" if text else f"## {title}\n\n{table}"


def describe_field_type(field: FieldInfo) -> str:
    """The type and the bounds of a setting, in words."""
    bounds = [
        f"{sign} {getattr(each, name)}"
        for each in field.metadata
        for name, sign in BOUNDS
        if getattr(each, name, None) is not None
    ]
    return ", ".join([describe_type(field.annotation), *bounds])


BOUNDS = (("ge", "at least"), ("gt", "over"), ("le", "at most"), ("lt", "under"))


def describe_default(value: Any) -> str:
    """A default as it would be written in the environment."""
    if value is None or value == "":
        return ""
    for power, unit in ((30, "GiB"), (20, "MiB")):
        if type(value) is int and value >= 1 << power and value % (1 << power) == 0:
            return f"`{value}` ({value >> power} {unit})"
    return f"`{value}`"
