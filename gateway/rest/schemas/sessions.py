"""Sessions: creating, forking and moving one; its settings and state."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gateway.rest.schemas.base import (
    MAX_SEED,
    Body,
    JsonObject,
    MetadataBody,
    Name,
    View,
    report_one_error,
)
from gateway.rest.schemas.episodes import EpisodesBody, EpisodeSettingsView
from gateway.rest.schemas.messages import ToolBody
from kvrecall.domain.session import Session
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.session_settings import (
    EpisodeSettings,
    ForkOrigin,
    LayerBudgets,
    RepairTrigger,
    Reselection,
)
from kvrecall.domain.state_machine import SessionState
from kvrecall.domain.tool_calls import PendingCall
from services.forks import ForkRequest
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
    repair_settings: JsonObject = Field(
        default={},
        max_length=64,
        description="Settings of the repair; their schema is `repair` of GET /v1/methods.",
    )
    repair_seconds: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="Time limit of one repair, in seconds; null: no limit.",
    )
    prefill: JsonObject = Field(
        default={},
        max_length=64,
        description="Settings of the prefill: what prompts attend to; their schema is `prefill` of GET /v1/methods.",
    )
    retrieve: JsonObject = Field(
        default={},
        max_length=64,
        description="Settings of retrieval while answers are generated; their schema is `retrieve` of "
        "GET /v1/methods. Empty: as the method does.",
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

    def to_domain(self) -> CreateSession:
        """Convert to the domain value."""
        return CreateSession(
            budget=self.budget,
            repair_rows=self.repair_rows,
            repair_on=None
            if self.repair_on is None
            else frozenset(RepairTrigger(trigger) for trigger in self.repair_on),
            method=self.method,
            method_settings=json.dumps(self.method_settings, sort_keys=True),
            seed=self.seed,
            tools=tuple(tool.to_domain() for tool in self.tools),
            metadata=self.metadata,
            model=self.model,
            episodes=self._episodes_to_domain(),
            layer_budgets=self.layer_budgets,
            repair_settings=json.dumps(self.repair_settings, sort_keys=True),
            repair_seconds=self.repair_seconds,
            reselect=None if self.reselect is None else self.reselect.to_domain(),
            prefill=json.dumps(self.prefill, sort_keys=True),
            retrieve=json.dumps(self.retrieve, sort_keys=True),
            expires_after_seconds=self.expires_after_seconds,
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


class PendingCallView(View):
    """Tool call whose result has not been appended to the conversation yet."""

    id: str
    name: str
    arguments: str
    status: str

    @classmethod
    def from_domain(cls, call: PendingCall) -> "PendingCallView":
        """Convert from the domain value."""
        return cls(
            id=call.call.id,
            name=call.call.name,
            arguments=call.call.arguments,
            status=call.status.value,
        )


class ForkOriginView(View):
    """Fork point: the parent session, and the turn at whose end the fork begins."""

    session: str
    turn: int

    @classmethod
    def from_domain(cls, origin: ForkOrigin | None) -> "ForkOriginView | None":
        """Convert from the domain value; None for a session that is no fork."""
        return None if origin is None else cls.model_validate(origin)


class ReselectionView(View):
    """When an answer selects the active rows anew, in tokens of it, and which share by token."""

    every: int
    first: int
    token_share: float


class SessionMemoryView(View):
    """Memory of a session as committed. Active, peak and bound rows are the largest layer's."""

    length: int
    budget: int
    active_rows: int
    peak_rows: int
    bound_rows: int
    active_bytes: int
    evicted_rows: int
    promoted_rows: int


class SessionView(View):
    """Session: its settings, its state, the number of turns and tokens.

    `durable`: as of the last turn, its rows survive the loss of their worker; null where that is not
    known, as before the first turn.
    """

    id: str
    state: str
    model: str
    worker: str
    budget: int | Literal["auto"]
    repair_rows: int
    repair_on: list[str]
    repair_settings: dict[str, Any]
    repair_seconds: float | None
    prefill: dict[str, Any]
    retrieve: dict[str, Any]
    method: str
    method_settings: dict[str, Any]
    layer_budgets: str | None
    reselect: ReselectionView | None
    episodes: EpisodeSettingsView | None
    seed: int
    expires_after_seconds: float | None
    tools: list[dict[str, Any]]
    metadata: dict[str, str]
    forked_from: ForkOriginView | None
    turns: int
    length: int
    pending_calls: list[PendingCallView]
    created_at: datetime
    updated_at: datetime
    memory: SessionMemoryView
    durable: bool | None

    @classmethod
    def from_domain(cls, session: Session, state: SessionState, model: str) -> "SessionView":
        """Convert from a session, its current state and the served model."""
        settings = session.settings
        return cls(
            id=session.id,
            state=state.value,
            model=model,
            worker=session.worker,
            budget=settings.budget or "auto",
            repair_rows=settings.repair_rows,
            repair_on=sorted(trigger.value for trigger in settings.repair_on),
            repair_settings=json.loads(settings.repair_settings),
            repair_seconds=settings.repair_seconds,
            prefill=json.loads(settings.prefill),
            retrieve=json.loads(settings.retrieve),
            method=settings.method,
            method_settings=json.loads(settings.method_settings),
            layer_budgets=settings.layer_budgets,
            reselect=None
            if settings.reselect is None
            else ReselectionView.model_validate(settings.reselect),
            episodes=EpisodeSettingsView.from_domain(settings.episodes),
            seed=settings.seed,
            expires_after_seconds=settings.expires_after_seconds,
            tools=[json.loads(tool) for tool in settings.tools],
            metadata=dict(settings.metadata),
            forked_from=ForkOriginView.from_domain(settings.forked_from),
            turns=session.turns,
            length=session.memory.length,
            pending_calls=[PendingCallView.from_domain(call) for call in session.calls],
            created_at=datetime.fromtimestamp(session.created_at, UTC),
            updated_at=datetime.fromtimestamp(session.updated_at, UTC),
            memory=SessionMemoryView.model_validate(session.memory),
            durable=session.memory.durable,
        )


class SessionPageView(View):
    """Page of sessions. Pass `next_cursor` as `cursor` to get the next page.

    `scanned` sessions were looked at for it: with a filter a page may have fewer than its limit, even
    none, and another may follow. `truncated`: there are more than those, which an order other than by
    creation leaves out.
    """

    sessions: list[SessionView]
    next_cursor: str | None
    scanned: int
    truncated: bool

    @classmethod
    def from_domain(cls, found: FoundSessions, model: str) -> "SessionPageView":
        """Convert from a page of sessions and the served model."""
        return cls(
            sessions=[
                SessionView.from_domain(session, state, model) for session, state in found.sessions
            ],
            next_cursor=found.next_cursor,
            scanned=found.scanned,
            truncated=found.truncated,
        )
