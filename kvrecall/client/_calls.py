"""Calls of the REST API: the request of each endpoint and the parser of its response.

Both clients send these calls; no endpoint is described anywhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar
from urllib.parse import quote

from kvrecall.client._parsing import parse
from kvrecall.client.models import (
    Episodes,
    EventReceipt,
    JsonObject,
    Memory,
    Message,
    PastRepair,
    Repairs,
    Turn,
)
from kvrecall.client.options import TurnOptions
from kvrecall.client.sessions import Session, SessionFilters, SessionOptions, SessionPage
from kvrecall.client.workers import Methods, Worker, WorkerLoad, Workers

Result = TypeVar("Result")
MessageInput = Message | Mapping[str, Any]
MessagesInput = str | MessageInput | Sequence[MessageInput]
EventType = Literal[
    "tool_call.started", "tool_call.delta", "tool_call.completed", "tool_call.failed"
]


class HasId(Protocol):
    """Object with the id of a session: a Session or a handle."""

    @property
    def id(self) -> str:
        """Id of the session."""


SessionInput = str | HasId


@dataclass(frozen=True)
class Call(Generic[Result]):
    """HTTP request relative to the base URL, and the parser of its response's JSON.

    `repeatable`: sending it twice has the effect of sending it once, for a write given a `key`.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    parse: Callable[[Any], Result]
    body: Mapping[str, Any] | None = None
    params: Mapping[str, str | int] | None = None
    key: str | None = None
    repeatable: bool = True


def get_id(session: SessionInput) -> str:
    """Return the id of a session given as an id, a Session or a handle."""
    return session if isinstance(session, str) else session.id


def to_messages(messages: MessagesInput) -> list[JsonObject]:
    """Convert to the API's list of messages; a string is a user message."""
    if isinstance(messages, str):
        return [Message.user(messages).to_json()]
    if isinstance(messages, Message | Mapping):
        messages = [messages]
    return [
        message.to_json() if isinstance(message, Message) else dict(message) for message in messages
    ]


def create_session(options: SessionOptions, key: str | None) -> Call[Session]:
    """POST /v1/sessions."""
    return Call("POST", "/v1/sessions", _parse_session, {**options}, key=key)


def list_sessions(limit: int, cursor: str | None, filters: SessionFilters) -> Call[SessionPage]:
    """GET /v1/sessions."""
    params: dict[str, Any] = {"limit": limit, **filters}
    if cursor is not None:
        params["cursor"] = cursor
    return Call("GET", "/v1/sessions", lambda data: parse(SessionPage, data), params=params)


def get_session(session: SessionInput) -> Call[Session]:
    """GET /v1/sessions/{session}."""
    return Call("GET", _path(session), _parse_session)


def delete_session(session: SessionInput, key: str | None) -> Call[None]:
    """DELETE /v1/sessions/{session}."""
    return Call("DELETE", _path(session), lambda _: None, key=key)


def fork(
    session: SessionInput,
    turn: int | None,
    metadata: Mapping[str, str] | None,
    queue: bool,
    key: str | None,
) -> Call[Session]:
    """POST /v1/sessions/{session}/fork."""
    body = {"turn": turn, "metadata": metadata, "queue": queue}
    return Call("POST", _path(session, "/fork"), _parse_session, body, key=key)


def move(session: SessionInput, worker: str | None) -> Call[Session]:
    """POST /v1/sessions/{session}/move; not repeatable, as each one may choose another worker."""
    body = {"worker": worker}
    return Call("POST", _path(session, "/move"), _parse_session, body, repeatable=False)


def turn(
    session: SessionInput,
    messages: MessagesInput,
    options: TurnOptions,
    key: str | None,
    stream: bool = False,
) -> Call[Turn]:
    """POST /v1/sessions/{session}/turns."""
    body = {**options, "messages": to_messages(messages)}
    if stream:
        body["stream"] = True
    return Call("POST", _path(session, "/turns"), lambda data: parse(Turn, data), body, key=key)


def event(
    session: SessionInput,
    event_type: EventType,
    call_id: str,
    fields: Mapping[str, Any],
    key: str | None,
) -> Call[EventReceipt]:
    """POST /v1/sessions/{session}/events; None values of `fields` are left out."""
    given = {name: value for name, value in fields.items() if value is not None}
    body = {"type": event_type, "call_id": call_id, **given}
    return Call(
        "POST", _path(session, "/events"), lambda data: parse(EventReceipt, data), body, key=key
    )


def memory(session: SessionInput) -> Call[Memory]:
    """GET /v1/sessions/{session}/memory."""
    return Call("GET", _path(session, "/memory"), lambda data: parse(Memory, data))


def repairs(session: SessionInput, limit: int) -> Call[tuple[PastRepair, ...]]:
    """GET /v1/sessions/{session}/repairs."""
    return Call(
        "GET",
        _path(session, "/repairs"),
        lambda data: parse(Repairs, data).repairs,
        params={"limit": limit},
    )


def episodes(session: SessionInput) -> Call[Episodes]:
    """GET /v1/sessions/{session}/episodes."""
    return Call("GET", _path(session, "/episodes"), lambda data: parse(Episodes, data))


def methods() -> Call[Methods]:
    """GET /v1/methods."""
    return Call("GET", "/v1/methods", lambda data: parse(Methods, data))


def worker() -> Call[Worker]:
    """GET /v1/worker."""
    return Call("GET", "/v1/worker", lambda data: parse(Worker, data))


def workers() -> Call[tuple[WorkerLoad, ...]]:
    """GET /v1/workers."""
    return Call(
        "GET",
        "/v1/workers",
        lambda data: parse(Workers, data).workers,
    )


def _parse_session(data: Any) -> Session:
    return parse(Session, data)


def _path(session: SessionInput, suffix: str = "") -> str:
    return f"/v1/sessions/{quote(get_id(session), safe='')}{suffix}"
