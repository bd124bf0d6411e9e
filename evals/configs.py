"""What is compared: a method with its settings, how its budget is split, how its episodes are built; and budgets."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from evals.errors import BadArm, BadBudget
from kvrecall.domain.session_settings import EpisodeBuild, LayerBudgets
from workers import methods
from workers.errors import WorkerError

Build = Literal["none", EpisodeBuild]
FULL = "full"
FORM = 'METHOD[+one_pass|+per_episode|+none][@uniform|@pyramid|@sensitivity][{"setting": value}]'

_ARM = re.compile(
    r"(?P<method>\w+)(\+(?P<build>\w+))?(@(?P<layers>\w+))?(?P<settings>\{.*\})?", re.DOTALL
)
_SHARE = re.compile(r"1/([1-9]\d*)")


@dataclass(frozen=True)
class Arm:
    """One way to keep a conversation. `settings` is the method's JSON text; empty `layer_budgets`: the method's way."""

    name: str
    method: str
    build: Build = "none"
    layer_budgets: str = ""
    settings: str = "{}"

    @property
    def evicts(self) -> bool:
        """Whether a budget means anything."""
        return methods.METHODS[self.method].evicts

    @property
    def has_episodes(self) -> bool:
        """Whether episodes are built and matched."""
        return self.build != "none"


def arm_of(text: str) -> Arm:
    """An arm from its text, see FORM; a method that can have episodes has them, in one pass, unless told otherwise.

    Raises BadArm.
    """
    found = _ARM.fullmatch(text.strip())
    if found is None:
        raise BadArm(f"{text!r} is no arm; write {FORM}")
    settings = found["settings"] or "{}"
    try:
        method = methods.build(found["method"], settings)
    except WorkerError as error:
        raise BadArm(f"{text!r}: {error}") from error
    episodic = methods.describe(method.name).episodes
    build = found["build"] or ("one_pass" if episodic else "none")
    if build not in ("none", *get_args(EpisodeBuild)) or (build != "none" and not episodic):
        raise BadArm(
            f"{text!r}: {build!r} is no way to build the episodes of {method.name}; write {FORM}"
        )
    layers = found["layers"] or ""
    if layers and layers not in get_args(LayerBudgets):
        raise BadArm(f"{text!r}: a budget is split {', '.join(get_args(LayerBudgets))}")
    name = method.name + (f"+{build}" if episodic else "") + (f"@{layers}" if layers else "")
    return Arm(
        name + (found["settings"] or ""), method.name, cast("Build", build), layers, settings
    )


def arms_of(texts: Sequence[str]) -> tuple[Arm, ...]:
    """The named arms; for no name every method, those with episodes built both ways, the full cache left out."""
    if texts:
        return tuple(dict.fromkeys(arm_of(text) for text in texts))
    every = [arm_of(name) for name, method in methods.METHODS.items() if method.evicts]
    both = [arm_of(f"{arm.method}+per_episode") for arm in every if arm.has_episodes]
    return (*every, *both)


def rows_of(budget: str, length: int) -> int:
    """A budget in rows per head: of "1/8" an eighth of `length` tokens, of "256" 256. Raises BadBudget."""
    if share := _SHARE.fullmatch(budget):
        rows = length // int(share[1])
    elif budget.isdecimal():
        rows = int(budget)
    else:
        raise BadBudget(
            f"{budget!r} is no budget: write a number of rows, or a share of the history such as 1/8"
        )
    if not rows:
        raise BadBudget(f"a budget of {budget} leaves no row of a history of {length} tokens")
    return rows
