"""Examples from source code that is on every machine: the modules of Python's standard library (RepairKV 5.5).

A context is several modules, their lines numbered. One of them calls a function that one of them defines; the event
is that place in the code with the function's name taken out, and the question asks for the name.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from evals.errors import BadExample
from evals.harness import Message

REDACTED = "____"
_SHORTEST_NAME = 5
_LINES_BEFORE, _LINES_AFTER = 2, 1
_LARGEST_SHARE = 3
"""A module takes at most a third of the context."""
_TRIES = 200
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Module:
    """A source file. `defined`: the functions and methods it defines, with the lines on which they are."""

    name: str
    text: str
    defined: tuple[tuple[str, int], ...]
    calls: tuple["Call", ...]

    @property
    def listing(self) -> str:
        """The file under its name, every line with its number."""
        lines = (f"{number} {line}" for number, line in enumerate(self.text.splitlines(), start=1))
        return f"File {self.name}:\n" + "\n".join(lines)

    def line(self, number: int) -> str:
        """A line as the listing has it."""
        return f"{number} {self.text.splitlines()[number - 1]}"


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
        lines = self.calling.text.splitlines()
        first = max(1, self.call.line - _LINES_BEFORE)
        last = min(len(lines), self.call.line + _LINES_AFTER)
        shown = "\n".join(self.calling.line(number) for number in range(first, last + 1))
        redacted = re.sub(rf"\b{re.escape(self.answer)}\b", REDACTED, shown)
        scope = re.sub(rf"\b{re.escape(self.answer)}\b", REDACTED, self.call.scope)
        return f"File {self.calling.name}, line {self.call.line}, in {scope}:\n{redacted}"

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
        return [{"role": "user", "content": listing}, {"role": "assistant", "content": "I have read the files."}]

    def is_answered_by(self, reply: str) -> bool:
        """Whether a reply names it, and no other function that the context defines."""
        known = {name for module in self.modules for name, _ in module.defined}
        return set(_WORD.findall(reply)) & known == {self.answer}


def call_site(seed: int, tokens: int, length_of: Callable[[str], int]) -> CallSite:
    """An example whose modules take about `tokens` tokens, as `length_of` counts a text's; a function of these.

    Raises BadExample where no modules fit.
    """
    rng = random.Random(f"repository:{seed}:{tokens}")
    known = modules()
    for _ in range(_TRIES):
        chosen = _chosen(rng, known, tokens, length_of)
        sites = list(_sites(chosen))
        if sites:
            return rng.choice(sites)
    raise BadExample(f"no modules of the standard library with a call between them fit into {tokens} tokens")


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
    return Module(path.name, text, tuple(_defined(tree)), tuple(_calls(tree)))


def _defined(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def _calls(tree: ast.Module) -> Iterator[Call]:
    """Every call, under the innermost function or class that it is in."""

    def within(node: ast.AST, scope: str) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            inner = child.name if named else scope  # type: ignore[attr-defined]
            if isinstance(child, ast.Call):
                place = child.func.end_lineno or child.lineno
                if isinstance(child.func, ast.Name):
                    yield Call(child.func.id, place, scope)
                elif isinstance(child.func, ast.Attribute):
                    yield Call(child.func.attr, place, scope)
            yield from within(child, inner)

    return within(tree, "the module")


def _chosen(
    rng: random.Random, known: Sequence[Module], tokens: int, length_of: Callable[[str], int]
) -> tuple[Module, ...]:
    """Modules in a random order until the context is full; none is larger than its share."""
    chosen, room = list[Module](), tokens
    for module in rng.sample(known, len(known)):
        most = min(room, tokens // _LARGEST_SHARE)
        # Encoding takes time, and hardly a tokenizer makes less than one token of six characters.
        if len(module.text) > 6 * most:
            continue
        length = length_of(module.listing)
        if length <= most:
            chosen.append(module)
            room -= length
        if room < tokens // 16:
            break
    return tuple(chosen)


def _sites(chosen: tuple[Module, ...]) -> Iterator[CallSite]:
    """Calls of what exactly one of the modules defines, once; away from the definition; with a module to spare."""
    defined = [(name, line, module) for module in chosen for name, line in module.defined]
    names = [name for name, _, _ in defined]
    unique = {name: (line, module) for name, line, module in defined if names.count(name) == 1}
    for calling in chosen:
        for call in calling.calls:
            if call.called not in unique or len(call.called) < _SHORTEST_NAME or call.called.startswith("__"):
                continue
            line, defining = unique[call.called]
            unrelated = [each for each in chosen if each not in (calling, defining)]
            if unrelated and not (defining is calling and abs(line - call.line) <= _LINES_BEFORE + 1):
                yield CallSite(chosen, calling, call, defining, line, unrelated[-1])


def other_event(seed: int, one: CallSite, tokens: int, length_of: Callable[[str], int]) -> str:
    """The event of the next example about another file: the donor of WrongQ-K."""
    for donor in count(seed + 1_000_000):
        made = call_site(donor, tokens, length_of)
        if made.calling.name not in {module.name for module in one.modules}:
            return made.event
    raise AssertionError("some example is about another file")
