"""Arms of a comparison: sessions by method, settings and options, all at the same budgets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from evals.configs import FULL, RunConfig, parse_config
from evals.errors import BadConfig
from kvrecall.domain.limits import ServiceLimits
from kvrecall.protocol.v1 import worker_pb2 as pb


@dataclass(frozen=True)
class Arm:
    """A session to compare.

    Attributes:
        name: Its name in rows.
        config: Method, its settings and the split of its budget.
        options: Options of the session that act in the worker, `WorkerOptions` as JSON values, beside
            those of its configuration.
        repairs: Whether each turn repairs on its own messages, within the same budget.
    """

    name: str
    config: RunConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    repairs: bool = False

    def build_spec(self, session: str, budget: int, least: int, seed: int) -> pb.SessionSpec:
        """Specification of a session of this arm with `budget` rows per head in all.

        `least` is the worker's least budget, of which no row is reserved for repair.
        """
        options = {**self.config.worker_options, **self.options}
        return pb.SessionSpec(
            session=session,
            epoch=1,
            budget=budget,
            repair_rows=_repair_rows(budget, least) if self.repairs else 0,
            method=self.config.method,
            method_settings=self.config.settings,
            layer_budgets=self.config.layer_budgets,
            options=json.dumps(options) if options else "",
            seed=seed,
        )


def _repair_rows(budget: int, least: int) -> int:
    """Rows that a session reserves for repair by default, within its budget."""
    limits = ServiceLimits()
    rows = max(limits.default_repair_rows, int(budget * limits.default_repair_share))
    return max(0, min(rows, budget - least))


_ARMS = (
    Arm("full", parse_config(FULL)),
    Arm("streaming_llm", parse_config("streaming_llm")),
    Arm("h2o", parse_config("h2o")),
    Arm("snapkv", parse_config("snapkv")),
    Arm("adakv", parse_config("adakv")),
    Arm("keydiff", parse_config("keydiff")),
    Arm("chunkkv", parse_config("chunkkv")),
    Arm("snapkv+repair", parse_config("snapkv"), repairs=True),
    # Answers have some ten tokens: the paper's interval of 16 would never come.
    Arm("loopserve", parse_config('loopserve{"every":4,"first":4}')),
    Arm("snapkv+reselect", parse_config("snapkv"), {"reselect": {"every": 4, "first": 4}}),
    Arm("snapkv^stored", parse_config("snapkv^stored")),
    Arm(
        "snapkv^stored+reselect",
        parse_config("snapkv^stored"),
        {"reselect": {"every": 4, "first": 4}},
    ),
    Arm("icecache", parse_config("icecache")),
    Arm("keydiff+reselect", parse_config("keydiff"), {"reselect": {"every": 4, "first": 4}}),
)
# The arms of a run that names none, by name. A method with options of its session is one more line.
ARMS: Mapping[str, Arm] = MappingProxyType({arm.name: arm for arm in _ARMS})


def choose_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """The full cache and the arms of these names; other names are run configurations.

    Without a name, all of `ARMS`. Raises BadConfig.
    """
    chosen = {FULL: ARMS[FULL]}
    for text in texts or ARMS:
        chosen[text] = ARMS[text] if text in ARMS else _from_config(text)
    return tuple(chosen.values())


def _from_config(text: str) -> Arm:
    config = parse_config(text)
    if config.has_episodes or not config.evicts:
        raise BadConfig(
            f"{text!r} is no arm of multiturn: an arm evicts rows and has no episodes; "
            f"there are {', '.join(ARMS)}, and run configurations"
        )
    return Arm(config.name, config)
