"""Options that several commands share."""

from typing import Any


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that have a value: the others are left to the environment and the defaults."""
    return {name: value for name, value in options.items() if value is not None}
