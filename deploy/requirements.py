"""The requirements of kvrecall with some extras, or of one of its libraries, a line each.

`python deploy/requirements.py gateway otel`: for images, which install them before they copy the code.
Reads pyproject.toml and kvrecall/pyproject.toml in the current directory. Standard library only.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def get_requirements(names: list[str]) -> list[str]:
    """Return the requirements of the named extras, or of libraries that an extra requires.

    Raises KeyError for a name that is neither.
    """
    extras: dict[str, list[str]] = _read_project("pyproject.toml")["optional-dependencies"]
    shared: list[str] = _read_project("kvrecall/pyproject.toml")["dependencies"]
    lines = []
    for name in names:
        if name in extras:
            lines += shared + extras[name]
        else:
            lines.append(_find_library(name, extras))
    return list(dict.fromkeys(lines))


def _read_project(file: str) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads(Path(file).read_text(encoding="utf-8"))["project"]
    return project


def _find_library(name: str, extras: dict[str, list[str]]) -> str:
    for line in (line for extra in extras.values() for line in extra):
        if re.split(r"[\[<>=!~;]", line)[0] == name:
            return line
    raise KeyError(f"{name} is neither an extra nor one of their libraries: see pyproject.toml")


if __name__ == "__main__":
    print("\n".join(get_requirements(sys.argv[1:])))
