"""Requests of the gRPC API as domain values, checked by the REST API's bodies."""

from typing import Annotated, Any, Protocol

from google.protobuf.message import Message
from pydantic import Field

from gateway.grpc.convert import read_message
from gateway.grpc.errors import CallRefused
from gateway.http.errors import build_problem
from gateway.http.idempotency import build_idempotency_key
from gateway.rest.schemas.base import Body
from gateway.rest.schemas.events import CompletedBody, DeltaBody, FailedBody, StartedBody
from kvrecall.domain.codes import ErrorCode
from kvrecall.domain.tool_events import ToolEvent
from kvrecall.protocol.sessions_v1 import sessions_pb2 as pb
from services.access.principals import Principal
from services.catalog.records import REPAIRS_RETAINED, IdempotencyKey
from services.reading.search import Order, SessionQuery, State

_MAX_SESSION = 256
_MAX_KEY = 255
_EVENTS: dict[str, type[StartedBody | DeltaBody | CompletedBody | FailedBody]] = {
    "started": StartedBody,
    "delta": DeltaBody,
    "completed": CompletedBody,
    "failed": FailedBody,
}


class ListSessionsBody(Body):
    """Page of sessions; the query of GET /v1/sessions."""

    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: Annotated[str | None, Field(max_length=512)] = None
    state: State | None = None
    method: Annotated[str, Field(max_length=256)] = ""
    worker: Annotated[str, Field(max_length=256)] = ""
    q: Annotated[str, Field(max_length=200)] = ""
    order: Order = "created"

    def to_domain(self) -> SessionQuery:
        """Convert to the domain value."""
        return SessionQuery(
            limit=self.limit,
            cursor=self.cursor,
            state=self.state or "",
            method=self.method,
            worker=self.worker,
            text=self.q,
            order=self.order,
        )


class ListRepairsBody(Body):
    """Number of repairs; the query of GET /v1/sessions/{session}/repairs."""

    limit: Annotated[int, Field(ge=1, le=REPAIRS_RETAINED)] = 10


class WriteRequest(Protocol):
    """A request with an idempotency key."""

    @property
    def idempotency_key(self) -> str:
        """The client's key; empty: none."""
        ...


def get_session_id(request: Any) -> str:
    """Return the session that a request names. Raises CallRefused."""
    session: str = request.session
    if not 1 <= len(session) <= _MAX_SESSION:
        raise refuse_field("session", f"an id has 1 to {_MAX_SESSION} characters")
    return session


def get_key(
    request: WriteRequest, call: str, caller: Principal, session: str = "", body: Body | None = None
) -> IdempotencyKey | None:
    """Return the idempotency key of a write; None when the client sent none. Raises CallRefused."""
    key = request.idempotency_key
    if not key:
        return None
    if len(key) > _MAX_KEY:
        raise refuse_field("idempotency_key", f"a key has at most {_MAX_KEY} characters")
    operation = f"grpc {call} {session}"
    return build_idempotency_key(caller.tenant, operation, session, key, body)


def parse_event(request: pb.SendEventRequest) -> tuple[Body, ToolEvent]:
    """Return the REST body of an event and its domain value. Raises ValidationError, CallRefused."""
    kind = request.WhichOneof("event")
    if kind is None:
        raise refuse_field("event", f"an event is one of {', '.join(_EVENTS)}")
    report: Message = getattr(request, kind)
    values = {**_TEXTS[kind], **read_message(report)}
    call = {"type": f"tool_call.{kind}", "call_id": request.call_id}
    body = _EVENTS[kind].model_validate({**values, **call})
    return body, body.to_domain()


# Texts that REST requires, and that a message leaves out when they are empty.
_TEXTS: dict[str, dict[str, str]] = {
    "started": {},
    "delta": {"delta": ""},
    "completed": {"result": ""},
    "failed": {"result": ""},
}


def refuse_field(field: str, detail: str) -> CallRefused:
    """Build the refusal of a field."""
    return CallRefused(
        build_problem(ErrorCode.INVALID_REQUEST, f"{field}: {detail}", {"field": field})
    )
