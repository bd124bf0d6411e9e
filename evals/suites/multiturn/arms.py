"""Arms of a comparison: sessions by method, settings and options, all at the same budgets."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Any

from evals.configs import FULL, RunConfig, parse_config
from evals.errors import BadConfig
from kvrecall.domain.page_ids import KEY_BYTES
from kvrecall.domain.sessions.request import choose_repair_rows
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
            row_key=token_bytes(KEY_BYTES),  # it finds no pages of another
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
    return max(0, min(choose_repair_rows(budget), budget - least))


# What may follow a run configuration: `+repair`, `+reselect`, or `+reselect/2` every 2 tokens.
_OPTION = re.compile(r"(?P<config>.+)\+(?:repair|reselect(?:/(?P<every>\d+))?)")

# The arms of a run that names none.
DEFAULT_ARMS = (
    FULL,
    "streaming_llm",
    "h2o",
    "snapkv",
    "adakv",
    "keydiff",
    "chunkkv",
    "snapkv+repair",
    "loopserve",
    "snapkv+reselect",
    "snapkv^stored",
    "snapkv^stored+reselect",
    "icecache",
    "keydiff+reselect",
)


def choose_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """The full cache and the arms of these names, `DEFAULT_ARMS` if there are none.

    A name is a run configuration, with `+repair` or `+reselect` for a session that repairs on each
    turn or re-selects while it answers. Raises BadConfig.
    """
    return tuple(parse_arm(text) for text in dict.fromkeys((FULL, *(texts or DEFAULT_ARMS))))


def parse_arm(text: str) -> Arm:
    """Parse an arm's name, such as `snapkv^stored+reselect/2` or `full^0.98`. Raises BadConfig."""
    option = _OPTION.fullmatch(text)
    config = parse_config(option["config"] if option else text)
    sparse = config.cover > 0 and option is None
    if config.has_episodes or not (config.evicts or sparse or text == FULL):
        raise BadConfig(
            f"{text!r} is no arm of multiturn: an arm evicts rows or has sparse prompts, and has no "
            f"episodes; there are {', '.join(DEFAULT_ARMS)}, and run configurations"
        )
    if option is None:
        return Arm(config.name, config)
    if text.endswith("+repair"):
        return Arm(text, config, repairs=True)
    return Arm(
        text, config, {"reselect": {"every": int(every)} if (every := option["every"]) else {}}
    )
