"""Blocking client."""

import time
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Self, TypeVar, Unpack

import httpx

from kvrecall.client import _calls, _transport
from kvrecall.client._calls import Call, EventType, MessagesInput, SessionInput
from kvrecall.client._inspectors import Inspector
from kvrecall.client._sse import EventParser
from kvrecall.client._streams import TurnStream
from kvrecall.client.events import TurnCompleted, TurnEvent
from kvrecall.client.exceptions import KvrecallError, NotFound, StreamBroken
from kvrecall.client.models import (
    Episodes,
    EventReceipt,
    Memory,
    PastRepair,
    Turn,
)
from kvrecall.client.options import TurnOptions
from kvrecall.client.sessions import Session, SessionFilters, SessionOptions, SessionPage
from kvrecall.client.workers import Methods, Worker, WorkerLoad

Result = TypeVar("Result")


class KvrecallClient:
    """Client of the service at `base_url`. A context manager; not to be shared between threads.

    `api_key` is sent with each request, by default that of the environment (KVRECALL_API_KEY); it
    decides whose the sessions are. `tenant` does where the service needs no key. `timeout_seconds`
    bounds the wait for data. With `max_retries`, a call is repeated after a failed connection and when the
    service is overloaded or says when to try again; writes then get an idempotency key, so that they run once.

    `inspect` looks into sessions: their log, memory map, pauses and events.

    Methods raise ServiceProblem when the service responds with a problem, ConnectionFailed without
    a response. A `key` is an idempotency key: a repeated write with the same key runs once and gets
    the same response. Sessions are given as ids, as Session or as SessionHandle.
    """

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8420",
        timeout_seconds: float = 300.0,
        *,
        tenant: str = "",
        api_key: str | None = None,
        max_retries: int = 0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(
            base_url=base_url,
            timeout=_transport.build_timeout(timeout_seconds),
            headers=_transport.build_headers(tenant, api_key),
            transport=transport,
        )
        self._retries = _transport.RetryPolicy(max_retries)
        self.inspect = Inspector(self._send, self._request)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def session(
        self, *, keep: bool = False, key: str | None = None, **options: Unpack[SessionOptions]
    ) -> "SessionHandle":
        """Create a session as an object; as a context manager it is deleted, unless `keep`."""
        return SessionHandle(self, self.create_session(key=key, **options).id, keep)

    def attach(self, session: SessionInput) -> "SessionHandle":
        """Return an existing session as an object, without a request; it is never deleted."""
        return SessionHandle(self, _calls.get_id(session), keep=True)

    def create_session(
        self, *, key: str | None = None, **options: Unpack[SessionOptions]
    ) -> Session:
        """Create a session. Its settings are fixed; omitted ones get the service's defaults."""
        return self._send(_calls.create_session(options, key))

    def get_session(self, session: SessionInput) -> Session:
        """Get the settings and the state of a session."""
        return self._send(_calls.get_session(session))

    def list_sessions(
        self, limit: int = 50, cursor: str | None = None, **filters: Unpack[SessionFilters]
    ) -> SessionPage:
        """List sessions, one page at a time: newest first, unless `order` says otherwise."""
        return self._send(_calls.list_sessions(limit, cursor, filters))

    def delete_session(self, session: SessionInput, *, key: str | None = None) -> None:
        """Delete a session with its conversation and its stored rows."""
        self._send(_calls.delete_session(session, key))

    def fork(
        self,
        session: SessionInput,
        turn: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        queue: bool = False,
        key: str | None = None,
    ) -> Session:
        """Create a session that continues this one from the end of `turn`, by default the last."""
        return self._send(_calls.fork(session, turn, metadata, queue, key))

    def move(self, session: SessionInput, worker: str | None = None) -> Session:
        """Move a session to another worker: to the named one, or to the best of the others."""
        return self._send(_calls.move(session, worker))

    def turn(
        self,
        session: SessionInput,
        messages: MessagesInput = (),
        *,
        key: str | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Append messages and generate a reply; wait for its end.

        `messages` are the new ones only: a string (a user message), a message or a list of them. It
        may be empty when tool results are waiting to be appended.
        """
        return self._send(_calls.turn(session, messages, options, key))

    def stream(
        self,
        session: SessionInput,
        messages: MessagesInput = (),
        *,
        key: str | None = None,
        **options: Unpack[TurnOptions],
    ) -> TurnStream:
        """Append messages and generate a reply, as an iterator of its events."""
        return TurnStream(self._stream(_calls.turn(session, messages, options, key, stream=True)))

    def event(
        self,
        session: SessionInput,
        event_type: EventType,
        call_id: str,
        *,
        result: str | None = None,
        delta: str | None = None,
        index: int | None = None,
        arguments: str | None = None,
        key: str | None = None,
    ) -> EventReceipt:
        """Report the progress of a tool call, which may start a repair.

        `result` belongs to completed and failed, `delta` and `index` to delta, `arguments` to
        started.
        """
        fields = {"result": result, "delta": delta, "index": index, "arguments": arguments}
        return self._send(_calls.event(session, event_type, call_id, fields, key))

    def memory(self, session: SessionInput) -> Memory:
        """Get the current memory of a session: rows per layer, bytes per tier."""
        return self._send(_calls.memory(session))

    def repairs(self, session: SessionInput, limit: int = 10) -> tuple[PastRepair, ...]:
        """List the last repairs of a session, newest first, with the promoted passages."""
        return self._send(_calls.repairs(session, limit))

    def episodes(self, session: SessionInput) -> Episodes:
        """List the episodes of a session: size, medoid, number of matched turns."""
        return self._send(_calls.episodes(session))

    def methods(self) -> Methods:
        """List the eviction methods and the repair, with the schemas of their settings."""
        return self._send(_calls.methods())

    def worker(self) -> Worker:
        """Get the served model and its limits."""
        return self._send(_calls.worker())

    def workers(self) -> tuple[WorkerLoad, ...]:
        """List the reachable workers and their load."""
        return self._send(_calls.workers())

    def ready(self) -> bool:
        """Return True if the service accepts requests."""
        try:
            return self._http.get("/readyz", params={"workers": True}).is_success
        except httpx.TransportError:
            return False

    def _send(self, call: Call[Result]) -> Result:
        return _transport.parse_response(call, self._request(call, stream=False))

    def _stream(self, call: Call[Turn]) -> Generator[TurnEvent, None, None]:
        response = self._request(call, stream=True)
        parser = EventParser()
        try:
            for line in response.iter_lines():
                if (event := parser.feed(line)) is not None:
                    yield event
                    if isinstance(event, TurnCompleted):
                        return
        except httpx.TransportError as error:
            raise _transport.to_connection_failed(error) from error
        finally:
            response.close()
        raise StreamBroken

    def _request(self, call: Call[Result], *, stream: bool) -> httpx.Response:
        """Send a request, after failures again. With `stream` the response is not read yet.

        Raises ServiceProblem and ConnectionFailed.
        """
        call = self._retries.prepare(call)
        attempt = 0
        while True:
            try:
                return self._request_once(call, stream)
            except KvrecallError as error:
                delay = self._retries.get_delay(call, error, attempt)
                if delay is None:
                    raise
            time.sleep(delay)
            attempt += 1

    def _request_once(self, call: Call[Result], stream: bool) -> httpx.Response:
        try:
            request = _transport.build_request(self._http, call)
            response = self._http.send(request, stream=stream)
            if response.is_error:
                response.read()
        except httpx.TransportError as error:
            raise _transport.to_connection_failed(error) from error
        if response.is_error:
            raise _transport.to_problem(response)
        return response


class SessionHandle:
    """Session as an object: `KvrecallClient`'s methods without their first argument.

    As a context manager it deletes its session at the end, unless it is to be kept.
    """

    def __init__(self, client: KvrecallClient, session: str, keep: bool) -> None:
        self._client = client
        self._id = session
        self._keep = keep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._keep:
            return
        try:
            self.delete()
        except NotFound:
            return

    @property
    def id(self) -> str:
        """Id of the session."""
        return self._id

    def get(self) -> Session:
        """Get the settings and the current state of the session."""
        return self._client.get_session(self)

    def say(
        self,
        messages: MessagesInput = (),
        *,
        key: str | None = None,
        **options: Unpack[TurnOptions],
    ) -> Turn:
        """Append messages and generate a reply; as `KvrecallClient.turn`."""
        return self._client.turn(self, messages, key=key, **options)

    def stream(
        self,
        messages: MessagesInput = (),
        *,
        key: str | None = None,
        **options: Unpack[TurnOptions],
    ) -> TurnStream:
        """Append messages and generate a reply, as an iterator of its events."""
        return self._client.stream(self, messages, key=key, **options)

    def tool_started(
        self, call_id: str, arguments: str | None = None, *, key: str | None = None
    ) -> EventReceipt:
        """Report that a tool call runs; `arguments` (JSON text) replace the model's, if given."""
        return self._client.event(self, "tool_call.started", call_id, arguments=arguments, key=key)

    def tool_delta(
        self, call_id: str, delta: str, index: int | None = None, *, key: str | None = None
    ) -> EventReceipt:
        """Report a chunk of a tool's output; with `index` from 0 chunks may come in any order."""
        return self._client.event(
            self, "tool_call.delta", call_id, delta=delta, index=index, key=key
        )

    def tool_result(self, call_id: str, result: str, *, key: str | None = None) -> EventReceipt:
        """Report the result of a tool call; the next turn appends it."""
        return self._client.event(self, "tool_call.completed", call_id, result=result, key=key)

    def tool_failed(self, call_id: str, error: str, *, key: str | None = None) -> EventReceipt:
        """Report the failure of a tool call; the model reads `error` as its result."""
        return self._client.event(self, "tool_call.failed", call_id, result=error, key=key)

    def fork(
        self,
        turn: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        queue: bool = False,
        keep: bool = False,
        key: str | None = None,
    ) -> "SessionHandle":
        """Create a session that continues this one from the end of `turn`, by default the last."""
        fork = self._client.fork(self, turn, metadata=metadata, queue=queue, key=key)
        return SessionHandle(self._client, fork.id, keep)

    def move(self, worker: str | None = None) -> Session:
        """Move the session to another worker."""
        return self._client.move(self, worker)

    def memory(self) -> Memory:
        """Get the current memory of the session."""
        return self._client.memory(self)

    def repairs(self, limit: int = 10) -> tuple[PastRepair, ...]:
        """List the last repairs, newest first, with the promoted passages."""
        return self._client.repairs(self, limit)

    def episodes(self) -> Episodes:
        """List the episodes of the session."""
        return self._client.episodes(self)

    def delete(self, *, key: str | None = None) -> None:
        """Delete the session with its conversation and its stored rows."""
        self._client.delete_session(self, key=key)
