"""The environment variables that are settings of kvrecall."""

from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from kvrecall_server.app.settings import Settings


def _find_names(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _find_names(kind, f"{prefix}{name.upper()}__")
        else:
            yield f"{prefix}{name.upper()}"


def find_unknown(variables: Iterable[str]) -> set[str]:
    """Names that begin like those of settings, and are none."""
    known = set(_find_names(Settings, "KVRECALL_"))
    return {name for name in variables if name.startswith("KVRECALL_")} - known
