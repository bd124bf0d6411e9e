"""What comes in over HTTP: the request bodies, their bounds and examples, and the domain values they stand for."""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from kvrecall.domain.limits import ServiceLimits
from kvrecall.domain.messages import Message, Sampling, ToolCall
from kvrecall.domain.session_request import CreateSession
from kvrecall.domain.session_settings import (
    EpisodeBuild,
    EpisodeSettings,
    LayerBudgets,
    RepairScan,
    RepairTrigger,
)
from kvrecall.domain.tool_events import ToolEvent, ToolEventType
from kvrecall.domain.turn_request import TurnRequest

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
JsonObject = dict[str, Any]
MetadataBody = Annotated[
    dict[Name, Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=32)
]
MAX_SEED = 2**63 - 1


class Body(BaseModel):
    """A request body: unknown fields are refused, and nothing is converted silently."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class FunctionBody(Body):
    """The function of a tool call."""

    name: Name
    arguments: str = Field(description="JSON text of an object.", examples=['{"city": "Bern"}'])


class ToolCallBody(Body):
    """A tool call of an assistant message, as in the OpenAI API."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionBody

    def value(self) -> ToolCall:
        """The domain's value."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


class MessageBody(Body):
    """A message, as in the OpenAI API. `content` may be null when there are tool calls."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=128)
    tool_call_id: Name | None = None
    name: Name | None = None

    def value(self) -> Message:
        """The domain's value."""
        calls = tuple(call.value() for call in self.tool_calls or ())
        return Message(
            self.role, self.content or "", calls, self.tool_call_id or "", self.name or ""
        )


class ToolFunctionBody(Body):
    """What a tool is called, what it does and what it takes."""

    model_config = ConfigDict(extra="allow")

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None


class ToolBody(Body):
    """A tool that the model may call, as in the OpenAI API."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    function: ToolFunctionBody


def _one_complaint(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Say once what is wrong, under the field's own name: a union complains of each of its kinds."""
    try:
        return check(value)
    except ValidationError as error:
        raise ValueError("a whole number from 1 to 64, or auto") from error


EpisodeCountBody = Annotated[
    Annotated[int, Field(ge=1, le=64)] | Literal["auto"], WrapValidator(_one_complaint)
]


class EpisodesBody(Body):
    """How a session's episodes are made: segments of the conversation, clustered by what they are about."""

    count: EpisodeCountBody = Field(
        default=4, description="Episodes; auto: 2 to 16, by silhouette."
    )
    segment_utterances: int = Field(
        default=4, ge=1, le=64, description="Utterances that are embedded as one."
    )
    medoid_utterances: int = Field(
        default=8, ge=1, le=64, description="Utterances that stand for an episode."
    )
    build: EpisodeBuild = Field(
        default="one_pass",
        description="Score stored rows for all episodes at once, or prefill the log for each.",
    )
    rebuild_growth: float = Field(
        default=0.25, gt=0, le=100, description="Growth after which they are built again."
    )

    def value(self) -> EpisodeSettings:
        """The domain's value."""
        return EpisodeSettings(**dict(self))


class MoveBody(Body):
    """Where a session is to go on."""

    worker: Name | None = Field(
        default=None, description="A worker's name; null: the best of the others."
    )


class CreateSessionBody(Body):
    """What is fixed when a session is created; what is left out is chosen by the service."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"budget": 256, "repair_rows": 64, "method": "snapkv"}]}
    )

    model: Name | None = Field(
        default=None, description="Refused if the service does not serve this model."
    )
    budget: int | None = Field(
        default=None, ge=1, lt=2**31, description="Active rows per KV head, mean over layers."
    )
    repair_rows: int | None = Field(
        default=None, ge=0, lt=2**31, description="Rows of it kept free; 0: no repair."
    )
    repair_on: list[Literal["tool_call", "tool_delta", "tool_result", "last_output", "turn"]] = (
        Field(
            default=["tool_call", "tool_delta", "tool_result"],
            max_length=5,
            description="What a repair is conditioned on. All but turn are run between turns.",
        )
    )
    repair_scan: RepairScan | None = Field(
        default=None, description="How a repair finds its candidates; null: the worker's default."
    )
    repair_settings: JsonObject = Field(
        default={},
        max_length=64,
        description="How a repair chooses: see repair of GET /v1/methods.",
    )
    repair_seconds: float | None = Field(
        default=None,
        gt=0,
        le=3600,
        description="The most seconds of one repair; null: as many as it needs.",
    )
    method: Name | None = Field(
        default=None, description="Eviction method: a name of GET /v1/methods."
    )
    method_settings: JsonObject = Field(default={}, max_length=64)
    layer_budgets: LayerBudgets | None = Field(
        default=None,
        description="How the budget is split over the layers; null: the method's own way.",
    )
    episodes: EpisodesBody | None = Field(
        default=None, description="Left out: with methods that look at episodes; null: none."
    )
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    tools: list[ToolBody] = Field(default=[], max_length=128)
    metadata: MetadataBody = {}

    def value(self) -> CreateSession:
        """The domain's value."""
        return CreateSession(
            budget=self.budget,
            repair_rows=self.repair_rows,
            repair_on=frozenset(RepairTrigger(trigger) for trigger in self.repair_on),
            method=self.method,
            method_settings=json.dumps(self.method_settings, sort_keys=True),
            seed=self.seed,
            tools=tuple(
                json.dumps(tool.model_dump(exclude_unset=True) | {"type": "function"})
                for tool in self.tools
            ),
            metadata=self.metadata,
            model=self.model,
            episodes=self._episodes(),
            layer_budgets=self.layer_budgets,
            repair_scan=self.repair_scan,
            repair_settings=json.dumps(self.repair_settings, sort_keys=True),
            repair_seconds=self.repair_seconds,
        )

    def _episodes(self) -> EpisodeSettings | Literal["default"] | None:
        if "episodes" not in self.model_fields_set:
            return "default"
        return None if self.episodes is None else self.episodes.value()


class SamplingBody(Body):
    """How the next token is chosen. Without a temperature the answer is greedy."""

    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float = Field(default=0.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31, description="0: off.")
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    stop: list[Annotated[str, StringConstraints(min_length=1, max_length=256)]] = Field(
        default=[], max_length=16
    )

    def value(self, settings: ServiceLimits) -> Sampling:
        """The domain's value."""
        return Sampling(
            max_tokens=settings.default_max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop),
        )


class FidelityBody(Body):
    """Measuring: keep this turn's distributions, or compare with a session that kept those of the same turn."""

    keep: bool = False
    against: Name | None = None


class TurnBody(Body):
    """What is new in the conversation, and what shall happen with it."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"messages": [{"role": "user", "content": "Hello."}]}]}
    )

    messages: list[MessageBody] = Field(
        default=[], description="New ones only; none when tool results wait."
    )
    generate: bool = Field(default=True, description="False: only remember.")
    stream: bool = Field(
        default=False, description="Answer as server-sent events: token, tool_call, done, error."
    )
    queue: bool = Field(
        default=False,
        description="Wait (for a bounded time) while another turn of the session runs.",
    )
    repair: bool | None = Field(
        default=None,
        description="Repair with these messages before they are read; null: if repair_on has turn.",
    )
    wait_for_repairs: bool = Field(
        default=False,
        description="Let repairs that are due end first; else the turn takes what they have found so far.",
    )
    sampling: SamplingBody = SamplingBody()
    fidelity: FidelityBody = FidelityBody()

    def value(self, settings: ServiceLimits) -> TurnRequest:
        """The domain's value."""
        return TurnRequest(
            messages=tuple(message.value() for message in self.messages),
            generate=self.generate,
            sampling=self.sampling.value(settings),
            seed=self.sampling.seed,
            queue=self.queue,
            keep_distribution=self.fidelity.keep,
            compare_with=self.fidelity.against or "",
            repair=self.repair,
            wait_for_repairs=self.wait_for_repairs,
        )


class StartedBody(Body):
    """The client has begun to run a tool call."""

    type: Literal["tool_call.started"]
    call_id: Name
    arguments: str | None = Field(
        default=None,
        description="JSON text of an object: what is really run, where it is not what the model wrote.",
        examples=['{"city": "Bern"}'],
    )

    def value(self) -> ToolEvent:
        """The domain's value."""
        return ToolEvent(ToolEventType.STARTED, self.call_id, arguments=self.arguments)


class DeltaBody(Body):
    """A piece of a tool's output, before its result."""

    type: Literal["tool_call.delta"]
    call_id: Name
    delta: str
    index: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="From 0: pieces in any order, each once. Left out: after what is there.",
    )

    def value(self) -> ToolEvent:
        """The domain's value."""
        return ToolEvent(ToolEventType.DELTA, self.call_id, self.delta, index=self.index)


class CompletedBody(Body):
    """The result of a tool call."""

    type: Literal["tool_call.completed"]
    call_id: Name
    result: str

    def value(self) -> ToolEvent:
        """The domain's value."""
        return ToolEvent(ToolEventType.COMPLETED, self.call_id, self.result)


class FailedBody(Body):
    """A tool call that failed; `result` is the error text, which the model will read."""

    type: Literal["tool_call.failed"]
    call_id: Name
    result: str

    def value(self) -> ToolEvent:
        """The domain's value."""
        return ToolEvent(ToolEventType.FAILED, self.call_id, self.result)


EventBody = Annotated[
    StartedBody | DeltaBody | CompletedBody | FailedBody, Field(discriminator="type")
]
