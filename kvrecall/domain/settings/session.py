"""The settings that are fixed when a session is created."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal

from kvrecall.domain.settings.methods import RECALL
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.repair import RepairRule
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval


class RepairTrigger(StrEnum):
    """The signal that a repair is conditioned on.

    A call's name and arguments, a tool's output so far, tool results, the last generated answer, or
    the messages of a turn before they are prefilled.
    """

    TOOL_CALL = "tool_call"
    TOOL_DELTA = "tool_delta"
    TOOL_RESULT = "tool_result"
    LAST_OUTPUT = "last_output"
    TURN = "turn"


# Signals of a pause: their repairs delay no first token.
PAUSE_TRIGGERS = frozenset(
    {RepairTrigger.TOOL_CALL, RepairTrigger.TOOL_DELTA, RepairTrigger.TOOL_RESULT}
)


LayerBudgets = Literal["uniform", "pyramid", "sensitivity"]
"""How a session's budget is split over the layers."""
EpisodeCount = int | Literal["auto"]
EpisodeBuild = Literal["one_pass", "per_episode"]


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of a session's episodes, with the constants that only research replaces.

    Segments of `segment_utterances` utterances, clustered into `count` episodes. `one_pass` scores the
    stored rows for all episodes together; `per_episode` prefills the whole log once for each
    (EpiCache's own way). A patched prompt takes about `medoid_utterances`. Episodes are rebuilt when
    the conversation has grown by the share `rebuild_growth`.
    """

    count: EpisodeCount = 4
    segment_utterances: int = 4
    medoid_utterances: int = 32
    build: EpisodeBuild = "one_pass"
    rebuild_growth: float = 0.25


@dataclass(frozen=True)
class ForkOrigin:
    """The fork point: the end of turn `turn` of `session`, which may be deleted since."""

    session: str
    turn: int


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options that act in the worker alone: gateway and services pass them on unchanged.

    `repair_seconds`: deadline of one repair; None: none. `reselect`: None leaves it to the method.
    `prefill`: what prompts attend to; None leaves it to the method. `retrieve`: retrieval while
    decoding; None leaves it to the method. `template_arguments`: the text of a JSON object, further
    arguments of the model's chat template, which is a client's own and may hold anything.
    `keep_reasoning`: earlier answers stay as they were said, whatever the template does with their
    reasoning once a user's message follows.
    """

    repair_seconds: float | None = None
    reselect: Reselection | None = None
    prefill: Prefill | None = None
    retrieve: Retrieval | None = None
    template_arguments: str = "{}"
    keep_reasoning: bool = False

    @property
    def retrieves(self) -> bool | None:
        """Return whether decoding retrieves rows; None leaves it to the method."""
        return None if self.retrieve is None else self.retrieve.share > 0

    @property
    def worker_options(self) -> "WorkerOptions":
        """These options alone."""
        return WorkerOptions(
            **{each.name: getattr(self, each.name) for each in fields(WorkerOptions)}
        )


# A request that nothing followed, of a client that never asks for its session again.
ONE_SHOT_SECONDS = 3600.0
# One of several answers to one request, with which the client did not go on.
BRANCH_SECONDS = 600.0
# Characters of a salt, and of a memory's name.
MAX_CACHE_SALT = 256
MAX_MEMORY_NAME = 256


@dataclass(frozen=True)
class SessionSettings(WorkerOptions):
    """Settings that are fixed at creation.

    `method_settings`: those that differ from the method's own, checked against its class in
    `METHOD_SETTINGS`. `repair_settings`: None is the default. Each tool is the text of a JSON object.

    - `budget`: rows per KV head; None: chosen by the worker, by the rows that the session has.
    - `episodes`: None disables them.
    - `layer_budgets`: None takes the method's default.
    - `tenant`: the owner; rows are shared and counted within a tenant.
    - `forked_from`: the fork point of a fork.
    - `expires_after_seconds`: the session is deleted so long after its last turn; None: never.
    - `matched`: requests find the session by their history. Its clients know nothing of pauses, so
      its tool calls never time out: a person may approve one a day later.
    - `stored`: it was begun by a response that clients may go on from by its id.
    - `branch`: its first turn is one of several answers to one request.
    - `remember`: its turns see what sessions with the same name here have said, of the same tenant and
      salt; empty: nothing.
    - `cache_salt`: rows and conversations are shared with requests of the same salt only; empty: with
      those without one. It may be a secret of the client: no API and no text of an error shows it.
    """

    budget: int | None
    repair_rows: int
    method: str
    repair_on: frozenset[RepairTrigger] = PAUSE_TRIGGERS
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    tools: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    episodes: EpisodeSettings | None = None
    layer_budgets: LayerBudgets | None = None
    repair_settings: RepairRule | None = None
    tenant: str = ""
    forked_from: ForkOrigin | None = None
    expires_after_seconds: float | None = None
    matched: bool = False
    stored: bool = False
    branch: bool = False
    cache_salt: str = field(default="", repr=False)
    remember: str = ""

    @property
    def memory(self) -> str:
        """The name of the memory that the session shares with others in one catalog; empty: none."""
        if not self.remember:
            return ""
        return json.dumps([self.tenant, self.cache_salt, self.remember])

    @property
    def recall(self) -> bool:
        """Whether every token stays reachable: answers find rows among all that the session has."""
        return self.method == RECALL if self.retrieves is None else self.retrieves

    def get_lifetime(self, turns: int) -> float | None:
        """Return the seconds after which the session is deleted unless a turn follows its `turns`.

        None is never. A matched session with one turn and without tools may be all there was, and a
        branch with one turn of its own is one of several of which the client takes one.
        """
        inherited = 0 if self.forked_from is None else self.forked_from.turn
        if self.branch and turns <= inherited + 1:
            return min(self.expires_after_seconds or BRANCH_SECONDS, BRANCH_SECONDS)
        goes_on = not self.matched or self.stored or turns > 1 or bool(self.tools)
        if self.expires_after_seconds is None or goes_on:
            return self.expires_after_seconds
        return min(self.expires_after_seconds, ONE_SHOT_SECONDS)

    def repairs_on(self, trigger: RepairTrigger) -> bool:
        """Return whether the session repairs on `trigger`.

        It is enabled, and there are rows to promote into.
        """
        return self.repair_rows > 0 and trigger in self.repair_on
