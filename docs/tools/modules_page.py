"""The map of modules: a line for each, the first line of its docstring, by room."""

import ast
from collections import defaultdict
from pathlib import Path

from tables import to_table

ROOMS = (
    "kvrecall",
    "gateway",
    "services",
    "workers",
    "kvstore",
    "evals",
    "benchmarks",
    "reference",
)
INTRODUCTION = """# Module map

One line per module: the first line of its docstring. [Architecture](../architecture.md) says how
they work together, and which may import which.
"""


def build(root: Path) -> str:
    """The page's text."""
    folders: dict[Path, list[Path]] = defaultdict(list)
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            ignored = {"runs", ".venv"} & set(path.relative_to(root).parts)
            if "_pb2" not in path.name and not ignored:
                folders[path.parent].append(path)
    sections = [to_section(root, folder, paths) for folder, paths in folders.items()]
    return "\n".join([INTRODUCTION, *sections])


def to_section(root: Path, folder: Path, paths: list[Path]) -> str:
    """A heading for the folder, its own docstring, a table of its modules."""
    package = folder / "__init__.py"
    text = first_line(package) if package in paths else ""
    rows = [[f"`{path.name}`", first_line(path)] for path in paths if path != package]
    title = f"## `{folder.relative_to(root).as_posix()}/`\n"
    return "\n".join(
        part for part in (title, f"{text}\n", to_table(["module", ""], rows)) if part.strip()
    )


def first_line(path: Path) -> str:
    """The first line of a module's docstring; empty where there is none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.strip().partition("\n")[0]
