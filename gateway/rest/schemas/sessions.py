"""Sessions: creating, forking and moving one; its settings and state."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from gateway.rest.schemas.base import (
    MAX_SEED,
    Body,
    CacheSalt,
    JsonObject,
    MetadataBody,
    Name,
    report_one_error,
)
from gateway.rest.schemas.episodes import EpisodesBody
from gateway.rest.schemas.messages import ToolBody
from gateway.rest.schemas.public import copy_optional, copy_to
from kvrecall import client
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.repair import RepairSettings
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import EpisodeSettings, LayerBudgets, RepairTrigger
from kvrecall.domain.tool_calls import PendingCall
from services.lifecycle.forks import ForkRequest
from services.reading.search import FoundSessions


class ReselectionBody(Body):
    """Selection of the active rows by an answer's own tokens, among all rows, as it is generated."""

    every: int = Field(
        default=Reselection.every,
        ge=1,
        le=256,
        description="Tokens of the answer between two selections.",
    )
    first: int = Field(
        default=Reselection.first,
        ge=0,
        lt=2**31,
        description="Tokens of the answer before the first selection; 0: at the prompt's end.",
    )
    token_share: float = Field(
        default=Reselection.token_share,
        ge=0,
        le=1,
        description="Share of the rows that are whole tokens, the same in all layers and heads, "
        "selected as in repairs by their mean attention; each head selects the others by its own.",
    )

    def to_domain(self) -> Reselection:
        """Convert to the domain value."""
        return Reselection(self.every, self.first, self.token_share)


def _none_for_empty(value: Any) -> Any:
    """Return None for an empty object, which leaves all to the method as null does."""
    return None if value == {} else value


def _show(settings: RepairSettings | Prefill | Retrieval | None) -> JsonObject:
    return {} if settings is None else asdict(settings)


BudgetBody = Annotated[
    Annotated[int, Field(ge=1, lt=2**31)] | Literal["auto"],
    report_one_error("expected an integer from 1 on, or auto"),
]


class CreateSessionBody(Body):
    """Settings of a new session, fixed for its lifetime. Omitted ones get the service's default."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"budget": 256, "repair_rows": 64, "method": "snapkv"}]}
    )

    model: Name | None = Field(
        default=None, description="Expected model; rejected unless the service serves it."
    )
    budget: BudgetBody | None = Field(
        default=None,
        description="Active rows per KV head, mean over layers. auto: all of its rows while they fit a "
        "slot, then an eighth of them, at least 1,024 and no more than a slot holds. null: the service's "
        "default, which is auto unless the operator has set another.",
    )
    repair_rows: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Rows of the budget reserved for repair; 0: no repair.",
    )
    repair_on: (
        list[Literal["tool_call", "tool_delta", "tool_result", "last_output", "turn"]] | None
    ) = Field(
        default=None,
        max_length=5,
        description="Signals that trigger a repair. All but turn run between turns. null: all but "
        "last_output, and without turn where answers retrieve.",
    )
    repair_settings: Annotated[RepairSettings | None, BeforeValidator(_none_for_empty)] = Field(
        default=None, description="Settings of the repair. null or empty: the defaults."
    )
    repair_seconds: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Time limit of one repair, in seconds; null: no limit.",
    )
    prefill: Annotated[Prefill | None, BeforeValidator(_none_for_empty)] = Field(
        default=None,
        description="Settings of the prefill: what prompts attend to. null or empty: as the method does.",
    )
    retrieve: Annotated[Retrieval | None, BeforeValidator(_none_for_empty)] = Field(
        default=None,
        description="Settings of retrieval while answers are generated. null or empty: as the method does.",
    )
    keep_reasoning: bool = Field(
        default=False,
        description="Earlier answers keep their reasoning, also where the model's chat template drops "
        "it once a user's message follows.",
    )
    method: Name | None = Field(
        default=None, description="Eviction method; one of GET /v1/methods."
    )
    method_settings: JsonObject = Field(
        default={},
        max_length=64,
        description="Settings of the method; their schema is in GET /v1/methods.",
    )
    layer_budgets: LayerBudgets | None = Field(
        default=None,
        description="Split of the budget over the layers; null: the method's own split.",
    )
    reselect: ReselectionBody | None = Field(
        default=None,
        description="Select the active rows anew while an answer is generated; null: as the method "
        "does.",
    )
    episodes: EpisodesBody | None = Field(
        default=None,
        description="Episode settings; null: no episodes. Omitted: the default settings with a "
        "method that supports episodes.",
    )
    seed: int | None = Field(
        default=None, ge=0, le=MAX_SEED, description="Seed of the session; null: random."
    )
    expires_after_seconds: float | None = Field(
        default=None,
        ge=60,
        le=10 * 365 * 86_400,
        description="Time without a turn after which the session is deleted; null: never.",
    )
    tools: list[ToolBody] = Field(
        default=[], max_length=128, description="Tools that the model may call."
    )
    metadata: MetadataBody = Field(
        default={}, description="Key-value pairs stored with the session."
    )
    cache_salt: CacheSalt | None = Field(
        default=None,
        description="Share rows and conversations only with requests of the same salt, such as a random "
        "string for each end user. null: with those that have none. Never shown.",
    )

    def to_domain(self) -> CreateSession:
        """Convert to the domain value."""
        return CreateSession(
            budget=self.budget,
            repair_rows=self.repair_rows,
            repair_on=None
            if self.repair_on is None
            else frozenset(RepairTrigger(trigger) for trigger in self.repair_on),
            method=self.method,
            method_settings=self.method_settings,
            seed=self.seed,
            tools=tuple(tool.to_domain() for tool in self.tools),
            metadata=self.metadata,
            model=self.model,
            episodes=self._episodes_to_domain(),
            layer_budgets=self.layer_budgets,
            repair_settings=self.repair_settings,
            repair_seconds=self.repair_seconds,
            reselect=None if self.reselect is None else self.reselect.to_domain(),
            prefill=self.prefill,
            retrieve=self.retrieve,
            keep_reasoning=self.keep_reasoning,
            expires_after_seconds=self.expires_after_seconds,
            cache_salt=self.cache_salt or "",
        )

    def _episodes_to_domain(self) -> EpisodeSettings | Literal["default"] | None:
        if "episodes" not in self.model_fields_set:
            return "default"
        return None if self.episodes is None else self.episodes.to_domain()


class ForkBody(Body):
    """Fork point, and metadata of the new session."""

    turn: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Fork at the end of this turn; null: the last one.",
    )
    metadata: MetadataBody | None = Field(
        default=None, description="Metadata of the new session; null: a copy of the parent's."
    )
    queue: bool = Field(
        default=False, description="Wait (for a bounded time) while a turn of the session runs."
    )

    def to_domain(self) -> ForkRequest:
        """Convert to the domain value."""
        return ForkRequest(self.turn, self.metadata, self.queue)


class MoveBody(Body):
    """Target worker of a session."""

    worker: Name | None = Field(
        default=None, description="Name of the worker; null: the best of the others."
    )


def to_session(session: Session, state: SessionState, model: str) -> client.Session:
    """Convert a session, its current state and the served model."""
    settings = session.settings
    return copy_to(
        client.Session,
        settings,
        id=session.id,
        state=state.value,
        model=model,
        worker=session.worker,
        budget=settings.budget or "auto",
        repair_on=tuple(sorted(trigger.value for trigger in settings.repair_on)),
        repair_settings=_show(settings.repair_settings),
        prefill=_show(settings.prefill),
        retrieve=_show(settings.retrieve),
        method_settings=dict(settings.method_settings),
        reselect=copy_optional(client.Reselection, settings.reselect),
        episodes=copy_optional(client.EpisodeSettings, settings.episodes),
        tools=tuple(json.loads(tool) for tool in settings.tools),
        forked_from=copy_optional(client.ForkOrigin, settings.forked_from),
        turns=session.turns,
        length=session.memory.length,
        pending_calls=tuple(_to_pending_call(call) for call in session.calls),
        created_at=datetime.fromtimestamp(session.created_at, UTC),
        updated_at=datetime.fromtimestamp(session.updated_at, UTC),
        memory=copy_to(client.SessionMemory, session.memory),
        durable=session.memory.durable,
    )


def to_session_page(found: FoundSessions, model: str) -> client.SessionPage:
    """Convert a page of sessions of the served model."""
    sessions = tuple(to_session(session, state, model) for session, state in found.sessions)
    return copy_to(client.SessionPage, found, sessions=sessions)


def _to_pending_call(call: PendingCall) -> client.PendingCall:
    return copy_to(client.PendingCall, call.call, status=call.status.value)
