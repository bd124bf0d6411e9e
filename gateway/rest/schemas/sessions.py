"""Sessions: creating, forking and moving one; its settings and state."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.rest.schemas.base import (
    MAX_SEED,
    Body,
    CacheSalt,
    MemoryName,
    MetadataBody,
    Name,
    report_one_error,
)
from gateway.rest.schemas.messages import ToolBody
from gateway.rest.schemas.public import copy_optional, copy_to
from gateway.rest.schemas.research import ResearchBody, to_research
from gateway.rest.schemas.template_arguments import TemplateArguments
from kvrecall import client
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.sessions.state_machine import SessionState
from kvrecall.domain.settings.methods import FULL_CACHE
from kvrecall.domain.tool_calls import PendingCall
from services.lifecycle.forks import ForkRequest
from services.reading.search import FoundSessions

BudgetBody = Annotated[
    Annotated[int, Field(ge=1, lt=2**31)] | Literal["auto"],
    report_one_error("expected an integer from 1 on, or auto"),
]


class CreateSessionBody(Body):
    """Settings of a new session, fixed for its lifetime. Omitted ones get the service's default."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"budget": 1024}]})

    model: Name | None = Field(
        default=None, description="Expected model; rejected unless the service serves it."
    )
    recall: bool | None = Field(
        default=None,
        description="true, the default: every token stays reachable within the budget. Each step of an "
        "answer finds the rows that it needs among all rows. false: the full cache, which ends where a "
        "slot does.",
    )
    budget: BudgetBody | None = Field(
        default=None,
        description="Active rows per KV head, mean over layers. auto: all of its rows while they fit a "
        "slot, then an eighth of them, at least 1,024 and no more than a slot holds. null: the service's "
        "default, which is auto unless the operator has set another.",
    )
    keep_reasoning: bool = Field(
        default=False,
        description="Earlier answers keep their reasoning, also where the model's chat template drops "
        "it once a user's message follows.",
    )
    chat_template_kwargs: TemplateArguments | None = Field(
        default=None,
        description="Further arguments of the model's chat template, such as enable_thinking; "
        "`template_variables` of GET /v1/worker are those that it reads.",
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
    remember: MemoryName | None = Field(
        default=None,
        description="Name of a memory, such as one for each end user. Each turn sees the rows of the five "
        "exchanges nearest to the user's message, of all sessions with this name. null: none.",
    )
    research: ResearchBody | None = Field(
        default=None,
        description="How the active rows are chosen, for evaluations and papers. Its settings may change "
        "in any release.",
    )

    @model_validator(mode="before")
    @classmethod
    def _point_to_research(cls, values: Any) -> Any:
        """Tell a request that has a setting of `research` beside it where the setting belongs."""
        moved = ResearchBody.model_fields.keys() & (values if isinstance(values, dict) else ())
        if moved:
            errors = [
                InitErrorDetails(
                    type=PydanticCustomError("moved", f"{name} is now research.{name}"),
                    loc=(name,),
                    input=values[name],
                )
                for name in sorted(moved)
            ]
            raise ValidationError.from_exception_data(cls.__name__, errors)
        return values

    @field_validator("research")
    @classmethod
    def _choose_method_once(
        cls, research: ResearchBody | None, info: ValidationInfo
    ) -> ResearchBody | None:
        if research is not None and research.method and info.data.get("recall") is not None:
            message = "recall and research.method both choose the method; send one"
            raise PydanticCustomError("chosen_twice", message)
        return research

    def to_domain(self) -> CreateSession:
        """Convert to the domain value."""
        research = self.research or ResearchBody()
        return CreateSession(
            method=FULL_CACHE if self.recall is False else research.method,
            budget=self.budget,
            seed=self.seed,
            tools=tuple(tool.to_domain() for tool in self.tools),
            metadata=self.metadata,
            model=self.model,
            keep_reasoning=self.keep_reasoning,
            template_arguments=json.dumps(self.chat_template_kwargs or {}, sort_keys=True),
            expires_after_seconds=self.expires_after_seconds,
            cache_salt=self.cache_salt or "",
            remember=self.remember or "",
            **research.to_members(),
        )


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
        research=to_research(settings),
        chat_template_kwargs=json.loads(settings.template_arguments),
        tools=tuple(json.loads(tool) for tool in settings.tools),
        forked_from=copy_optional(client.ForkOrigin, settings.forked_from),
        turns=session.turns,
        length=session.memory.length,
        pending_calls=tuple(_to_pending_call(call) for call in session.calls),
        created_at=datetime.fromtimestamp(session.created_at, UTC),
        updated_at=datetime.fromtimestamp(session.updated_at, UTC),
        memory=copy_to(client.SessionMemory, session.memory),
        durable=session.memory.durable,
        remember=settings.remember or None,
    )


def to_session_page(found: FoundSessions, model: str) -> client.SessionPage:
    """Convert a page of sessions of the served model."""
    sessions = tuple(to_session(session, state, model) for session, state in found.sessions)
    return copy_to(client.SessionPage, found, sessions=sessions)


def _to_pending_call(call: PendingCall) -> client.PendingCall:
    return copy_to(client.PendingCall, call.call, status=call.status.value)
