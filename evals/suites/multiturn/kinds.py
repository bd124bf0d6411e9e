"""Kinds of dialogues by name: generated ones, and those made of recorded text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from evals.errors import BadSuite
from evals.languages.base import Language
from evals.suites.multiturn import airline, locomo, longbench
from evals.suites.multiturn.dialogue import Dialogue, Size
from evals.suites.multiturn.examples import generate

GENERATED = ("qa", "list", "fewshot")
RECORDED: Mapping[str, Callable[[int, Size, Sequence[Path]], Dialogue]] = MappingProxyType(
    {"locomo": locomo.build, "airline": airline.build, "longbench": longbench.build}
)


def check_kinds(kinds: Sequence[str], data: Sequence[str]) -> tuple[str, ...]:
    """The kinds of these names; without one, all generated ones.

    Raises BadSuite for a name that is none, for a kind of recorded text without data, and for two
    of them: they read different files.
    """
    for kind in kinds:
        if kind not in (*GENERATED, *RECORDED):
            known = ", ".join((*GENERATED, *RECORDED))
            raise BadSuite(f"there is no kind {kind!r} of dialogues; there are {known}")
    recorded = [kind for kind in kinds if kind in RECORDED]
    if recorded and not data:
        raise BadSuite(f"{recorded[0]} is made of recorded text: name its files by --data")
    if len(recorded) > 1:
        raise BadSuite(f"{' and '.join(recorded)} read different files: run them one by one")
    return tuple(dict.fromkeys(kinds)) or GENERATED


def build_dialogue(
    kind: str, seed: int, size: Size, language: Language, data: Sequence[str]
) -> Dialogue:
    """The dialogue of a kind and a seed. Raises BadExample, BadDataFile, BadReplayFile."""
    if kind in RECORDED:
        return RECORDED[kind](seed, size, [Path(each) for each in data])
    return generate(kind, seed, size, language)
