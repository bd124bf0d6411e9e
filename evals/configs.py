"""Run configurations (method, settings, layer budgets, episode build) and budgets."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from pydantic import TypeAdapter, ValidationError

from evals.errors import BadBudget, BadConfig
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import EpisodeBuild, LayerBudgets
from workers import methods
from workers.errors import WorkerError

Build = Literal["none", EpisodeBuild]
FULL = "full"
SYNTAX = (
    "METHOD[+one_pass|+per_episode|+none][/MEDOIDS][@uniform|@pyramid|@sensitivity]"
    '[^stored|^active|^COVER][~SHARE|~{"retrieve": value}][{"setting": value}]'
)

_CONFIG = re.compile(
    r"(?P<method>\w+)(\+(?P<build>\w+))?(/(?P<medoids>\d+))?(@(?P<layers>\w+))?"
    r"(\^(?:(?P<attend>stored|active)|(?P<cover>0?\.\d+)))?"
    r"(~(?P<retrieve>0?\.\d+|\{[^{}]*\}))?(?P<settings>\{.*\})?",
    re.DOTALL,
)
_SHARE = re.compile(r"1/([1-9]\d*)")


@dataclass(frozen=True)
class RunConfig:
    """One configuration to compare.

    `settings` is the method's JSON text; empty `layer_budgets` leaves the split to the method.
    `medoids` are utterances of a patched prompt; 0: as many as by default. `retrieve` is the JSON text
    of what answers retrieve rows with; empty: as the method says. `attend`: what prompts attend
    to, stored or active rows; empty: as the method says. `cover`: the share of the attention weight
    that the lines of sparse prompts cover; 0: prompts are not sparse.
    """

    name: str
    method: str
    build: Build = "none"
    layer_budgets: str = ""
    settings: str = "{}"
    medoids: int = 0
    retrieve: str = ""
    attend: str = ""
    cover: float = 0.0

    @property
    def evicts(self) -> bool:
        """True if the method evicts rows: without eviction a budget has no effect."""
        return methods.METHODS[self.method].evicts

    @property
    def worker_options(self) -> dict[str, Any]:
        """The session's options that act in the worker, `WorkerOptions` as JSON values."""
        options: dict[str, Any] = {}
        if self.retrieve:
            options["retrieve"] = json.loads(self.retrieve)
        if self.attend:
            options["prefill"] = {"attend": self.attend}
        elif self.cover:
            options["prefill"] = {"sparse": "on", "alpha": self.cover}
        return options

    @property
    def options(self) -> str:
        """The same, as a specification has them."""
        return json.dumps(self.worker_options) if self.worker_options else ""

    @property
    def has_episodes(self) -> bool:
        """True if episodes are built and matched."""
        return self.build != "none"


def parse_config(text: str) -> RunConfig:
    """Parse a run configuration, see SYNTAX. Raises BadConfig.

    A method that supports episodes has them built in one pass unless the text names another way.
    """
    found = _CONFIG.fullmatch(text.strip())
    if found is None:
        raise BadConfig(f"{text!r} is no run configuration; write {SYNTAX}")
    settings = found["settings"] or "{}"
    try:
        method = methods.build(found["method"], settings)
    except WorkerError as error:
        raise BadConfig(f"{text!r}: {error}") from error
    episodic = methods.describe(method.name).episodes
    build = found["build"] or ("one_pass" if episodic else "none")
    if build not in ("none", *get_args(EpisodeBuild)) or (build != "none" and not episodic):
        raise BadConfig(
            f"{text!r}: {build!r} is no way to build the episodes of {method.name}; write {SYNTAX}"
        )
    layers = found["layers"] or ""
    if layers and layers not in get_args(LayerBudgets):
        raise BadConfig(f"{text!r}: a budget is split {', '.join(get_args(LayerBudgets))}")
    medoids = int(found["medoids"] or 0)
    if medoids and build == "none":
        raise BadConfig(f"{text!r}: without episodes there are no medoids; write {SYNTAX}")
    name = method.name + (f"+{build}" if episodic else "") + (f"/{medoids}" if medoids else "")
    retrieve = found["retrieve"] or ""
    attend = found["attend"] or ""
    cover = float(found["cover"] or 0)
    name += (f"@{layers}" if layers else "") + (f"^{attend or cover}" if attend or cover else "")
    name += (f"~{retrieve}" if retrieve else "") + (found["settings"] or "")
    return RunConfig(
        name,
        method.name,
        cast("Build", build),
        layers,
        settings,
        medoids,
        _parse_retrieve(text, retrieve),
        attend,
        cover,
    )


def _parse_retrieve(text: str, retrieve: str) -> str:
    """The JSON text of settings of retrieval, which may be given as the share alone. Raises BadConfig."""
    if not retrieve.startswith("{"):
        return json.dumps({"share": float(retrieve)}) if retrieve else ""
    try:
        TypeAdapter(Retrieval).validate_json(retrieve)
    except ValidationError as error:
        raise BadConfig(f"{text!r}: {error}") from error
    return retrieve


def parse_configs(texts: Sequence[str]) -> tuple[RunConfig, ...]:
    """Parse the named configurations without repetitions. Raises BadConfig.

    No text stands for every method that evicts, methods with episodes with both ways to build them.
    """
    if texts:
        return tuple(dict.fromkeys(parse_config(text) for text in texts))
    every = [parse_config(name) for name, method in methods.METHODS.items() if method.evicts]
    rebuilt = [parse_config(f"{each.method}+per_episode") for each in every if each.has_episodes]
    return (*every, *rebuilt)


def budget_rows(budget: str, length: int) -> int:
    """Rows per head of a budget for a history of `length` tokens. Raises BadBudget.

    "1/8" is an eighth of the length, "256" is 256 rows.
    """
    if share := _SHARE.fullmatch(budget):
        rows = length // int(share[1])
    elif budget.isdecimal():
        rows = int(budget)
    else:
        raise BadBudget(
            f"{budget!r} is no budget: "
            "write a number of rows, or a share of the history such as 1/8"
        )
    if not rows:
        raise BadBudget(f"a budget of {budget} leaves no row of a history of {length} tokens")
    return rows
