"""Source of a checkout, parsed without importing it: modules, imports, names and prose."""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGES = (
    "kvrecall",
    "gateway",
    "services",
    "workers",
    "kvstore",
    "evals",
    "benchmarks",
    "reference",
)


@dataclass(frozen=True)
class Module:
    """A module of the tree: dotted name, path relative to the root, source text."""

    name: str
    path: Path
    text: str

    @property
    def room(self) -> str:
        """The package that holds the module; a package's `__init__` belongs to itself."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text)


class SourceTree:
    """The modules of one checkout, without generated ones and tests."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {module.name: module for module in self._load()}

    def _load(self) -> Iterator[Module]:
        for package in PACKAGES:
            for path in sorted((self.root / package).rglob("*.py")):
                relative = path.relative_to(self.root)
                if "_pb2" in path.name or "runs" in relative.parts:
                    continue
                parts = relative.with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield Module(name, relative, path.read_text(encoding="utf-8"))

    def matching(self, patterns: Iterable[str]) -> list[Module]:
        """Modules whose path matches one of the glob patterns."""
        return [m for m in self.modules.values() if any(m.path.match(each) for each in patterns)]

    def imports(self) -> Iterator[tuple[Module, str]]:
        """Imports between modules of the tree: the importing module and the imported one's name."""
        for module in self.modules.values():
            targets = {self._resolve(name) for name in imported_names(module.tree)}
            yield from ((module, target) for target in sorted(targets - {"", module.name}))

    def _resolve(self, name: str) -> str:
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, with the names taken from a module appended to it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_alias(statement: ast.stmt) -> bool:
    """True for a statement such as `Name = dict[...]`."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Subscript)
        and statement.targets[0].id[:1].isupper()
    )


def docstrings(tree: SourceTree) -> Iterator[str]:
    """Docstrings of modules, classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module in tree.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, kinds) and (doc := ast.get_docstring(node)):
                yield doc


def identifiers(tree: ast.Module) -> Iterator[str]:
    """Names of functions, classes, parameters, variables, attributes and keyword arguments."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name


def split_name(name: str) -> list[str]:
    """The words of an identifier in snake_case or CamelCase."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def prose_lines(module: Module) -> Iterator[str]:
    """Lines of docstrings and comments."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from str(node.value.value).splitlines()
    yield from re.findall(r"#\s(.*)", module.text)


def is_generator(function: ast.AsyncFunctionDef) -> bool:
    """True for a function that yields."""
    return any(isinstance(node, ast.Yield) for node in ast.walk(function))


def called_names(function: ast.AsyncFunctionDef) -> set[str]:
    """Names of what a function calls: its own class's methods and the module's functions."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    own = {
        each.attr
        for each in calls
        if isinstance(each, ast.Attribute)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return own | {each.id for each in calls if isinstance(each, ast.Name)}


def longest_chain(tree: ast.Module) -> int:
    """The longest chain of async generators of a file that call each other, from a turn's entry."""
    generators = {
        node.name: called_names(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncFunctionDef) and is_generator(node)
    }

    def depth(name: str, seen: frozenset[str]) -> int:
        if name not in generators or name in seen:
            return 0
        return 1 + max((depth(each, seen | {name}) for each in generators[name]), default=0)

    return max((depth(name, frozenset()) for name in TURN_ENTRIES), default=0)


TURN_ENTRIES = ("run", "turn", "Turn")
