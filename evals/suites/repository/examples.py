"""Examples from source code that is on every machine: the modules of Python's standard library (RepairKV 5.5).

A context is the beginnings of several modules, their lines numbered. One of them calls a function that one of them
defines; the event is that place in the code with the function's name taken out, and the question asks for the name.
"""

import ast
import random
import re
import sysconfig
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from evals.errors import BadExample
from evals.harness import Message

REDACTED = "____"
_SHORTEST_NAME = 5
_LINES_BEFORE = 2
_LINES_AFTER = 1
_LARGEST_SHARE = 4
"""A module takes at most a quarter of the context: of a longer one its first statements."""
_TRIES = 50
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Module:
    """A source file, or its beginning. `defined`: the functions and methods it defines, with the lines they are on.

    `ends`: the last lines of its statements, outermost ones only.
    """

    name: str
    text: str
    defined: tuple[tuple[str, int], ...]
    calls: tuple["Call", ...]
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
        """A line as the listing has it."""
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


@dataclass(frozen=True)
class Call:
    """A call of a function by its name, or of a method, on a line of its own file; `scope`: the function it is in."""

    called: str
    line: int
    scope: str


@dataclass(frozen=True)
class CallSite:
    """An example. `unrelated`: the module that the first turn asks about; `defining`: where the name is defined."""

    modules: tuple[Module, ...]
    calling: Module
    call: Call
    defining: Module
    defined_on: int
    unrelated: Module

    @property
    def answer(self) -> str:
        """The name that was taken out."""
        return self.call.called

    @property
    def event(self) -> str:
        """The place in the code, with the name taken out wherever it stands there."""
        return event_of(self.calling, self.call)

    @property
    def question(self) -> str:
        """What the second turn asks, after the event."""
        return f"Which name stands at {REDACTED} in line {self.call.line} of {self.calling.name}? Say the name alone."

    @property
    def first_question(self) -> str:
        """What the first turn asks: of a file that has nothing to do with it."""
        return f"Which functions does {self.unrelated.name} define?"

    def context(self) -> list[Message]:
        """The modules as a message of the user's, and that they were read."""
        listing = "\n\n".join(module.listing for module in self.modules)
        return [
            {"role": "user", "content": listing},
            {"role": "assistant", "content": "I have read the files."},
        ]

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply names it, and no other function that the context defines."""
        known = {name for module in self.modules for name, _ in module.defined}
        return set(_WORD.findall(reply)) & known == {self.answer}


def call_site(seed: int, tokens: int, length_of: Callable[[str], int]) -> CallSite:
    """An example whose modules take about `tokens` tokens, as `length_of` counts a text's; a function of these.

    Raises BadExample where no modules fit.
    """
    rng = random.Random(f"repository:{seed}:{tokens}")
    for _ in range(_TRIES):
        sites = list(_sites(_chosen(rng, tokens, length_of)))
        if sites:
            return rng.choice(sites)
    raise BadExample(
        f"no modules of the standard library with a call between them fit into {tokens} tokens"
    )


def event_of(calling: Module, call: Call) -> str:
    """Some lines around a call, with the called name taken out."""
    first = max(1, call.line - _LINES_BEFORE)
    last = min(len(calling.lines), call.line + _LINES_AFTER)
    shown = "\n".join(calling.line(number) for number in range(first, last + 1))
    name = re.compile(rf"\b{re.escape(call.called)}\b")
    place = f"File {calling.name}, line {call.line}, in {name.sub(REDACTED, call.scope)}"
    return f"{place}:\n{name.sub(REDACTED, shown)}"


def other_event(seed: int, one: CallSite) -> str:
    """An event in a module that an example does not have: the donor of WrongQ-K."""
    rng = random.Random(f"other:{seed}")
    shown = {module.name for module in one.modules}
    for module in rng.sample(modules(), len(modules())):
        named = {name for name, _ in module.defined}
        own = [call for call in module.calls if call.called in named]
        if own and module.name not in shown:
            return event_of(module, rng.choice(own))
    raise AssertionError("the standard library has more modules than an example")


@cache
def modules() -> tuple[Module, ...]:
    """The modules at the top of the standard library that parse and define something, by their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = (_module(path) for path in sorted(folder.glob("*.py")) if not path.name.startswith("_"))
    return tuple(module for module in found if module is not None and module.defined)


def _module(path: Path) -> Module | None:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return None
    if not text.isascii():
        return None
    ends = tuple(statement.end_lineno or statement.lineno for statement in tree.body)
    return Module(path.name, text, tuple(_defined(tree)), tuple(_calls(tree)), ends)


def _defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def _calls(tree: ast.Module) -> Iterator[Call]:
    """Every call, under the innermost function or class that it is in."""

    def within(node: ast.AST, scope: str) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = child.name
            if isinstance(child, ast.Call):
                place = child.func.end_lineno or child.lineno
                if isinstance(child.func, ast.Name):
                    yield Call(child.func.id, place, scope)
                elif isinstance(child.func, ast.Attribute):
                    yield Call(child.func.attr, place, scope)
            yield from within(child, inner)

    return within(tree, "the module")


def _chosen(rng: random.Random, tokens: int, length_of: Callable[[str], int]) -> tuple[Module, ...]:
    """The beginnings of modules in a random order, until the context is full."""
    chosen = list[Module]()
    room = tokens
    for module in rng.sample(modules(), len(modules())):
        begun = _beginning(module, min(room, tokens // _LARGEST_SHARE), length_of)
        if begun is not None:
            chosen.append(begun)
            room -= length_of(begun.listing)
        if room < tokens // 16:
            break
    return tuple(chosen)


def _beginning(module: Module, tokens: int, length_of: Callable[[str], int]) -> Module | None:
    """As many of its statements as fit, if they define something."""
    lengths = list(accumulate(len(line) + 1 for line in module.lines))
    # Hardly a tokenizer makes less than one token of six characters: no more need be encoded.
    ends = [end for end in module.ends if lengths[end - 1] <= 6 * tokens]
    fits = bisect_right(ends, tokens, key=lambda end: length_of(module.until(end).listing))
    begun = module.until(ends[fits - 1]) if fits else None
    return begun if begun is not None and begun.defined else None


def _sites(chosen: tuple[Module, ...]) -> Iterator[CallSite]:
    """Calls of what exactly one of the modules defines, once; away from the definition; with a module to spare."""
    defined = [(name, line, module) for module in chosen for name, line in module.defined]
    names = [name for name, _, _ in defined]
    unique = {name: (line, module) for name, line, module in defined if names.count(name) == 1}
    for calling in chosen:
        for call in calling.calls:
            if (
                call.called not in unique
                or len(call.called) < _SHORTEST_NAME
                or call.called.startswith("__")
            ):
                continue
            line, defining = unique[call.called]
            unrelated = [each for each in chosen if each not in (calling, defining)]
            if unrelated and not (
                defining is calling and abs(line - call.line) <= _LINES_BEFORE + 1
            ):
                yield CallSite(chosen, calling, call, defining, line, unrelated[-1])
