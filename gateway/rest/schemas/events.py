"""Tool events: progress and results of tool calls, and their acknowledgement."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.rest.schemas.base import Body, Name
from gateway.rest.schemas.public import copy_to
from kvrecall import client
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


def to_receipt(receipt: EventReceipt) -> client.EventReceipt:
    """Convert the acknowledgement of an event."""
    return copy_to(client.EventReceipt, receipt)
