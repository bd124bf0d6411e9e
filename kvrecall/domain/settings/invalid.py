"""The first value that pydantic refused, for errors of one line."""

from pydantic import ValidationError


def find_invalid(error: ValidationError) -> tuple[str, str]:
    """Return the path of the first invalid value, empty for the whole, and what was expected."""
    first = error.errors(include_url=False)[0]
    return ".".join(map(str, first["loc"])), first["msg"]
