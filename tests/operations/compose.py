"""docker-compose.yml as Compose reads it: interpolated, and merged with an override."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tests.operations.catalogue import ROOT

Json = dict[str, Any]
BASE = "docker-compose.yml"
GPU = "docker-compose.gpu.yml"
_VARIABLE = re.compile(r"\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")


class MissingVariable(ValueError):
    """A variable that the file requires is not set."""


def read_compose(variables: Mapping[str, str], *overrides: str) -> Json:
    """Read the file and its overrides. Raises MissingVariable."""
    merged: Json = {}
    for name in (BASE, *overrides):
        text = (ROOT / name).read_text(encoding="utf-8")
        merged = _merge(merged, _interpolate(yaml.safe_load(text), variables))
    return merged


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _interpolate(inner, variables) for key, inner in value.items()}
    if isinstance(value, list):
        return [_interpolate(inner, variables) for inner in value]
    if not isinstance(value, str):
        return value

    def fill(match: re.Match[str]) -> str:
        name, form, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if form == ":?":
            raise MissingVariable(f"{name}: {rest}")
        assert form == ":-", f"{name} has neither a default nor a message"
        return rest

    return _VARIABLE.sub(fill, value)


def _merge(one: Any, other: Any) -> Any:
    """Mappings by key, lists one after the other; otherwise the override counts."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys((*one, *other))
        return {
            key: _merge(one[key], other[key]) if key in one and key in other else (one | other)[key]
            for key in keys
        }
    if isinstance(one, list) and isinstance(other, list):
        return one + other
    return other
