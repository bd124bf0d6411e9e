"""Changes of a body anywhere in it: another value, a member less, one twice, a list in another order."""

from typing import Any

from hypothesis import strategies as st

from benchmarks.fuzz.cases.json_text import Members
from benchmarks.fuzz.cases.texts import names
from benchmarks.fuzz.cases.values import values

Path = tuple[Any, ...]
_CHANGES = ("replace", "replace", "drop", "double", "rename", "reverse")
MOST = 2


def find_paths(value: Any) -> list[Path]:
    """Return the paths of everything within a value."""
    found: list[Path] = []
    for key, inner in _get_members(value):
        found += [(key,), *((key, *rest) for rest in find_paths(inner))]
    return found


def _get_members(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


@st.composite
def mutated(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> Any:
    """Draw a body and change it in up to two places; every second one stays as it is."""
    body = draw(bodies)
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, MOST)))):
        if paths := find_paths(body):
            path = draw(st.sampled_from(paths))
            body = _change(body, path, draw(st.sampled_from(_CHANGES)), draw(values), draw(names))
    return body


def _change(value: Any, path: Path, change: str, other: Any, name: str) -> Any:
    """Return the value with a change of what is at `path`; the value itself stays."""
    key, *rest = path
    if rest:
        inner = _change(value[key], tuple(rest), change, other, name)
        return _with(value, key, inner)
    if change == "replace":
        return _with(value, key, other)
    if change == "reverse" and isinstance(value[key], list):
        return _with(value, key, value[key][::-1])
    if isinstance(value, list):
        return value[:key] + ([value[key]] * 2 if change == "double" else []) + value[key + 1 :]
    members = [each for each in value.items() if each[0] != key]
    if change == "double":
        return Members((*value.items(), (key, other)))
    return dict([*members, (name, value[key])] if change == "rename" else members)


def _with(value: Any, key: Any, inner: Any) -> Any:
    copy = value.copy()
    copy[key] = inner
    return copy
