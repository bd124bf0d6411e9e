"""Call sites in modules of Python's standard library, which is on every machine (RepairKV 5.5).

A context is the beginnings of several modules with numbered lines. One of them calls a function
that one of them defines; the event is that place in the code with the function's name removed, and
the question asks for the name.
"""

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from evals.errors import BadExample
from evals.harness import Message
from evals.suites.repository.modules import Call, Module, load_modules

REDACTED = "____"
_SHORTEST_NAME = 5
_LINES_BEFORE = 2
_LINES_AFTER = 1
# A module takes at most a quarter of the context: of a longer one its first statements.
_LARGEST_SHARE = 4
# The context counts as full with less room than a sixteenth of it.
_SMALLEST_SHARE = 16
_TRIES = 50
# An upper bound: hardly any tokenizer makes less than one token of six characters.
_CHARACTERS_PER_TOKEN = 6
_WORD = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class CallSite:
    """An example: a call, and the module and line that define the called name.

    `unrelated` is the module that the first turn asks about.
    """

    modules: tuple[Module, ...]
    calling: Module
    call: Call
    defining: Module
    defined_on: int
    unrelated: Module

    @property
    def answer(self) -> str:
        """The name that was removed."""
        return self.call.called

    @property
    def event(self) -> str:
        """The place in the code, with the name removed wherever it occurs."""
        return build_event(self.calling, self.call)

    @property
    def question(self) -> str:
        """Question of the second turn, after the event."""
        return (
            f"Which name stands at {REDACTED} in line {self.call.line} of {self.calling.name}? "
            "Say the name alone."
        )

    @property
    def first_question(self) -> str:
        """Question of the first turn, about an unrelated file."""
        return f"Which functions does {self.unrelated.name} define?"

    def context(self) -> list[Message]:
        """The modules as a user message, and an acknowledgement."""
        listing = "\n\n".join(module.listing for module in self.modules)
        return [
            {"role": "user", "content": listing},
            {"role": "assistant", "content": "I have read the files."},
        ]

    def is_answered_by(self, reply: str) -> bool:
        """True if a reply names the answer and no other function that the context defines."""
        known = {name for module in self.modules for name, _ in module.defined}
        return set(_WORD.findall(reply)) & known == {self.answer}


def build_call_site(seed: int, tokens: int, count_tokens: Callable[[str], int]) -> CallSite:
    """An example whose modules take about `tokens` tokens, a function of the arguments.

    `count_tokens` counts the tokens of a text. Raises BadExample if no modules fit.
    """
    rng = random.Random(f"repository:{seed}:{tokens}")
    for _ in range(_TRIES):
        sites = list(_find_sites(_pick_modules(rng, tokens, count_tokens)))
        if sites:
            return rng.choice(sites)
    raise BadExample(
        f"no modules of the standard library with a call between them fit into {tokens} tokens"
    )


def build_event(calling: Module, call: Call) -> str:
    """Some lines around a call, with the called name removed."""
    first = max(1, call.line - _LINES_BEFORE)
    last = min(len(calling.lines), call.line + _LINES_AFTER)
    shown = "\n".join(calling.line(number) for number in range(first, last + 1))
    name = re.compile(rf"\b{re.escape(call.called)}\b")
    place = f"File {calling.name}, line {call.line}, in {name.sub(REDACTED, call.scope)}"
    return f"{place}:\n{name.sub(REDACTED, shown)}"


def build_donor_event(seed: int, site: CallSite) -> str:
    """An event in a module that is not in an example: the donor of WrongQ-K."""
    rng = random.Random(f"other:{seed}")
    shown = {module.name for module in site.modules}
    modules = load_modules()
    for module in rng.sample(modules, len(modules)):
        named = {name for name, _ in module.defined}
        own = [call for call in module.calls if call.called in named]
        if own and module.name not in shown:
            return build_event(module, rng.choice(own))
    raise AssertionError("the standard library has more modules than an example")


def _pick_modules(
    rng: random.Random, tokens: int, count_tokens: Callable[[str], int]
) -> tuple[Module, ...]:
    """Beginnings of modules in a random order, until the context is full."""
    picked = list[Module]()
    room = tokens
    modules = load_modules()
    for module in rng.sample(modules, len(modules)):
        beginning = _truncate(module, min(room, tokens // _LARGEST_SHARE), count_tokens)
        if beginning is not None:
            picked.append(beginning)
            room -= count_tokens(beginning.listing)
        if room < tokens // _SMALLEST_SHARE:
            break
    return tuple(picked)


def _truncate(module: Module, tokens: int, count_tokens: Callable[[str], int]) -> Module | None:
    """As many of a module's first statements as fit; None if they define nothing."""
    lengths = list(accumulate(len(line) + 1 for line in module.lines))
    # No more than this may fit, so no more needs to be encoded.
    limit = _CHARACTERS_PER_TOKEN * tokens
    ends = [end for end in module.ends if lengths[end - 1] <= limit]
    fits = bisect_right(ends, tokens, key=lambda end: count_tokens(module.until(end).listing))
    beginning = module.until(ends[fits - 1]) if fits else None
    return beginning if beginning is not None and beginning.defined else None


def _find_sites(picked: tuple[Module, ...]) -> Iterator[CallSite]:
    """Calls of names that exactly one of the modules defines, once.

    The call is away from the definition, and there is a module besides the two.
    """
    defined = [(name, line, module) for module in picked for name, line in module.defined]
    names = [name for name, _, _ in defined]
    unique = {name: (line, module) for name, line, module in defined if names.count(name) == 1}
    for calling in picked:
        for call in calling.calls:
            if not _is_askable(call.called) or call.called not in unique:
                continue
            line, defining = unique[call.called]
            unrelated = [each for each in picked if each not in (calling, defining)]
            is_near = defining is calling and abs(line - call.line) <= _LINES_BEFORE + 1
            if unrelated and not is_near:
                yield CallSite(picked, calling, call, defining, line, unrelated[-1])


def _is_askable(name: str) -> bool:
    return len(name) >= _SHORTEST_NAME and not name.startswith("__")
