"""Tool events: progress and results of tool calls, and their acknowledgement."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.rest.schemas.base import Body, Name, View
from kvrecall.domain.tool_events import EventReceipt, ToolEvent, ToolEventType


class StartedBody(Body):
    """Start of a tool call's execution by the client."""

    type: Literal["tool_call.started"]
    call_id: Name
    arguments: str | None = Field(
        default=None,
        description="JSON text of an object: the arguments in use, if not the model's.",
        examples=['{"city": "Bern"}'],
    )

    def to_domain(self) -> ToolEvent:
        """Convert to the domain value."""
        return ToolEvent(ToolEventType.STARTED, self.call_id, arguments=self.arguments)


class DeltaBody(Body):
    """Chunk of a tool's output, before its result."""

    type: Literal["tool_call.delta"]
    call_id: Name
    delta: str
    index: int | None = Field(
        default=None,
        ge=0,
        lt=2**31,
        description="Index from 0: chunks may arrive in any order, each one counts once. "
        "Null: after the last chunk.",
    )

    def to_domain(self) -> ToolEvent:
        """Convert to the domain value."""
        return ToolEvent(ToolEventType.DELTA, self.call_id, self.delta, index=self.index)


class CompletedBody(Body):
    """Result of a tool call."""

    type: Literal["tool_call.completed"]
    call_id: Name
    result: str

    def to_domain(self) -> ToolEvent:
        """Convert to the domain value."""
        return ToolEvent(ToolEventType.COMPLETED, self.call_id, self.result)


class FailedBody(Body):
    """Failure of a tool call; `result` is the error text that the model reads."""

    type: Literal["tool_call.failed"]
    call_id: Name
    result: str

    def to_domain(self) -> ToolEvent:
        """Convert to the domain value."""
        return ToolEvent(ToolEventType.FAILED, self.call_id, self.result)


EventBody = Annotated[
    StartedBody | DeltaBody | CompletedBody | FailedBody, Field(discriminator="type")
]


class EventView(View):
    """Durable acknowledgement of an event; `outstanding` lists the calls without a result.

    `late`: the event had no effect because the call has its result already.
    """

    session: str
    call_id: str
    type: str
    status: str
    state: str
    outstanding: list[str]
    late: bool

    @classmethod
    def from_domain(cls, receipt: EventReceipt) -> "EventView":
        """Convert from the domain value."""
        return cls(**vars(receipt) | {"outstanding": list(receipt.outstanding)})
