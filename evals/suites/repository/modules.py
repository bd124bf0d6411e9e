"""Modules of Python's standard library as the suite reads them: lines, definitions and calls."""

import ast
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """A call of a function by its name, or of a method, on a line of its file.

    `scope` is the innermost function or class around it.
    """

    called: str
    line: int
    scope: str


@dataclass(frozen=True)
class Module:
    """A source file, or its beginning.

    `defined` are the functions and methods that it defines with their lines; `ends` are the last
    lines of its outermost statements. Lines count from 1.
    """

    name: str
    text: str
    defined: tuple[tuple[str, int], ...]
    calls: tuple[Call, ...]
    ends: tuple[int, ...]

    @property
    def lines(self) -> list[str]:
        """Its lines as `ast` counts them."""
        return self.text.rstrip("\n").split("\n")

    @property
    def listing(self) -> str:
        """The file under its name, every line with its number."""
        lines = (f"{number} {line}" for number, line in enumerate(self.lines, start=1))
        return f"File {self.name}:\n" + "\n".join(lines)

    def line(self, number: int) -> str:
        """A line as in the listing."""
        return f"{number} {self.lines[number - 1]}"

    def until(self, last: int) -> "Module":
        """Its first `last` lines."""
        return Module(
            self.name,
            "\n".join(self.lines[:last]),
            tuple((name, line) for name, line in self.defined if line <= last),
            tuple(call for call in self.calls if call.line <= last),
            tuple(end for end in self.ends if end <= last),
        )


@cache
def load_modules() -> tuple[Module, ...]:
    """Public top-level modules of the standard library that parse and define something, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))
    modules = (_parse(path) for path in paths)
    return tuple(module for module in modules if module is not None and module.defined)


def _parse(path: Path) -> Module | None:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    if not text.isascii():
        return None
    ends = tuple(statement.end_lineno or statement.lineno for statement in tree.body)
    return Module(path.name, text, tuple(_list_defined(tree)), tuple(_list_calls(tree)), ends)


def _list_defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def _list_calls(node: ast.AST, scope: str = "the module") -> Iterator[Call]:
    """Every call under `node`, with the innermost function or class around it."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = child.name
        if isinstance(child, ast.Call):
            line = child.func.end_lineno or child.lineno
            if isinstance(child.func, ast.Name):
                yield Call(child.func.id, line, scope)
            elif isinstance(child.func, ast.Attribute):
                yield Call(child.func.attr, line, scope)
        yield from _list_calls(child, inner)
