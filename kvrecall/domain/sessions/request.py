"""A session as the client asks for it, and what the service makes of that.

Nothing is left to be chosen later.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvrecall.domain.errors import (
    BadSettings,
    BudgetOutOfRange,
    EpisodesUnsupported,
    UnknownMethod,
    UnknownModel,
)
from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.sessions.automatic_budget import choose_budget
from kvrecall.domain.settings.methods import FULL_CACHE, RECALL, check_method_settings
from kvrecall.domain.settings.repair import RepairRule
from kvrecall.domain.settings.session import (
    PAUSE_TRIGGERS,
    EpisodeSettings,
    LayerBudgets,
    RepairTrigger,
    SessionSettings,
    WorkerOptions,
)
from kvrecall.domain.worker_info import MethodInfo, WorkerInfo

# Rows of a budget that are kept free for repairs: a share, for the longer a session, the more of its
# passages resemble a question; and no fewer than pay.
_REPAIR_SHARE = 0.125
LEAST_REPAIR_ROWS = 64


@dataclass(frozen=True)
class CreateSession(WorkerOptions):
    """A session as the client asks for it; what is None is chosen by the service.

    `budget`: rows, or "auto" for one that follows from what the session holds, whatever the service's
    default is. By default a session has episodes where its method looks at them; None is none.
    """

    budget: int | Literal["auto"] | None = None
    repair_rows: int | None = None
    repair_on: frozenset[RepairTrigger] | None = None
    method: str | None = None
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    tools: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None
    model: str | None = None
    episodes: EpisodeSettings | Literal["default"] | None = "default"
    layer_budgets: LayerBudgets | None = None
    repair_settings: RepairRule | None = None
    tenant: str = ""
    expires_after_seconds: float | None = None
    matched: bool = False
    stored: bool = False
    branch: bool = False
    cache_salt: str = field(default="", repr=False)
    remember: str = ""

    @property
    def recall(self) -> bool:
        """Whether every token is to stay reachable, as of `SessionSettings`."""
        return self.method in (None, RECALL) if self.retrieves is None else self.retrieves


def resolve_settings(
    request: CreateSession, info: WorkerInfo, settings: ServiceLimits
) -> SessionSettings:
    """The request with everything chosen.

    Raises UnknownModel, UnknownMethod, BadSettings, BudgetOutOfRange, EpisodesUnsupported.
    """
    if request.model is not None and request.model != info.model:
        raise UnknownModel(
            "model", f"model {request.model!r} is not served here; {info.model!r} is"
        )
    method = _method(request.method or RECALL, info)
    check_method_settings(method.name, request.method_settings)
    budget = _choose_budget(request, info, settings)
    return SessionSettings(
        budget=budget,
        repair_rows=_repair_rows(request, method, budget, info),
        method=method.name,
        repair_on=_repair_on(request, method),
        method_settings=request.method_settings,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        tools=request.tools,
        metadata=request.metadata or {},
        episodes=_episodes(request, method),
        layer_budgets=request.layer_budgets,
        repair_settings=request.repair_settings,
        **vars(request.worker_options),
        tenant=request.tenant,
        expires_after_seconds=_get_lifetime(request, settings),
        matched=request.matched,
        stored=request.stored,
        branch=request.branch,
        cache_salt=request.cache_salt,
        remember=_check_memory(request, method),
    )


def choose_repair_rows(budget: int) -> int:
    """Return the rows of a budget that are kept free for repairs where no number is named."""
    return max(LEAST_REPAIR_ROWS, int(budget * _REPAIR_SHARE))


def _get_lifetime(request: CreateSession, settings: ServiceLimits) -> float | None:
    """Return `expires_after_seconds`; a session found by its history is deleted by no client."""
    if request.expires_after_seconds is None and request.matched:
        stored = settings.response_days * 86_400.0 if request.stored else 0.0
        return max(stored, settings.matched_seconds)
    return request.expires_after_seconds


def _method(name: str, info: WorkerInfo) -> MethodInfo:
    found = next((known for known in info.methods if known.name == name), None)
    if found is None:
        names = ", ".join(known.name for known in info.methods)
        raise UnknownMethod("research.method", f"unknown method {name!r}; expected one of {names}")
    return found


def _repair_on(request: CreateSession, method: MethodInfo) -> frozenset[RepairTrigger]:
    """Return the signals that are asked for; by default those of pauses and the turn itself.

    An answer that retrieves finds its rows by itself: no first token waits for a repair then.
    """
    if request.repair_on is not None:
        return request.repair_on
    return PAUSE_TRIGGERS if _retrieves(request, method) else PAUSE_TRIGGERS | {RepairTrigger.TURN}


def _retrieves(request: CreateSession, method: MethodInfo) -> bool:
    return method.retrieves if request.retrieves is None else request.retrieves


def _choose_budget(request: CreateSession, info: WorkerInfo, settings: ServiceLimits) -> int | None:
    """Return the rows of the budget; None: chosen by the worker. Raises BudgetOutOfRange."""
    budget = settings.default_budget if request.budget is None else request.budget
    if budget is None or budget == "auto":
        return None
    least = info.min_budget
    most = info.max_budget
    if budget < least:
        message = f"a budget of {budget} rows is under the sinks and the recent window; the least is {least}"
        raise BudgetOutOfRange("budget", message, least)
    if budget > most:
        raise BudgetOutOfRange(
            "budget", f"a budget of {budget} rows is over what a slot holds, {most}", most
        )
    return budget


def _repair_rows(
    request: CreateSession,
    method: MethodInfo,
    budget: int | None,
    info: WorkerInfo,
) -> int:
    """Return the rows that are kept free for repair. Raises BudgetOutOfRange.

    By default none for the full cache, and none where answers retrieve: they find what a repair would
    promote (docs/design/retrieval.md, "An agent's session").
    """
    asked = request.repair_rows
    budget = choose_budget(0, info.max_budget) if budget is None else budget
    spare = budget - info.min_budget
    if asked is None:
        if method.name == FULL_CACHE or _retrieves(request, method):
            return 0
        return min(choose_repair_rows(budget), spare)
    if asked > spare:
        message = f"{asked} rows kept for repair leave less than {info.min_budget} of a budget of {budget}"
        raise BudgetOutOfRange("research.repair_rows", message, spare)
    return asked


def _check_memory(request: CreateSession, method: MethodInfo) -> str:
    """Return the name of the session's memory; empty: none. Raises BadSettings."""
    if request.remember and not (method.name == RECALL and _retrieves(request, method)):
        message = (
            f"a session of method {method.name!r} has no memory; leave remember out, or take recall"
        )
        raise BadSettings("remember", message)
    return request.remember


def _episodes(request: CreateSession, method: MethodInfo) -> EpisodeSettings | None:
    """The episodes of a new session. Raises EpisodesUnsupported."""
    if request.episodes == "default":
        return EpisodeSettings() if method.episodes else None
    if request.episodes is not None and not method.episodes:
        message = f"evictions of method {method.name!r} do not look at episodes; leave them out, or take epicache"
        raise EpisodesUnsupported("research.episodes", message)
    return request.episodes
