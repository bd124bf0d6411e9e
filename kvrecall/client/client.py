"""A small typed client of the REST API, for scripts and the command line."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx

JsonObject = dict[str, Any]


class KvrecallError(Exception):
    """A request that was not served: the members of the problem that the service answered with.

    `status` is 0 and `code` is `connection_failed` when there was no answer at all.
    """

    def __init__(
        self, status: int, code: str, detail: str, members: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status = status
        self.code = code
        self.detail = detail
        self.members = dict(members or {})


@dataclass(frozen=True)
class StreamEvent:
    """An event of a streamed turn: `token`, `tool_call` or `done`, with its JSON data."""

    event: str
    data: JsonObject


class KvrecallClient:
    """One service at `base_url`. A context manager; safe to use from one thread at a time.

    `tenant` is whose sessions it sees, where no proxy in front says so.
    """

    def __init__(
        self,
        base_url: str,
        timeout_seconds: float = 300.0,
        transport: httpx.BaseTransport | None = None,
        tenant: str = "",
    ) -> None:
        timeout = httpx.Timeout(timeout_seconds, connect=10.0)
        headers = {"X-Kvrecall-Tenant": tenant} if tenant else {}
        self._http = httpx.Client(
            base_url=base_url, timeout=timeout, transport=transport, headers=headers
        )

    def __enter__(self) -> "KvrecallClient":
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

    def create_session(self, *, key: str | None = None, **settings: Any) -> JsonObject:
        """Open a session.

        Settings: budget, repair_rows, repair_on, repair_scan, repair_settings, repair_seconds, method,
        method_settings, layer_budgets, episodes, seed, tools, metadata, model.
        """
        return self._send("POST", "/v1/sessions", json=settings, key=key)

    def get(self, session: str) -> JsonObject:
        """A session's settings and state."""
        return self._send("GET", _path(session))

    def list(self, limit: int = 50, cursor: str | None = None) -> JsonObject:
        """A page of sessions, newest first, and `next_cursor`."""
        query: dict[str, str | int] = {"limit": limit}
        if cursor is not None:
            query["cursor"] = cursor
        return self._send("GET", "/v1/sessions", params=query)

    def fork(
        self,
        session: str,
        turn: int | None = None,
        *,
        metadata: Mapping[str, str] | None = None,
        queue: bool = False,
        key: str | None = None,
    ) -> JsonObject:
        """Open a session that begins as this one was at the end of a turn, the last one if none is named."""
        body = {"turn": turn, "metadata": metadata, "queue": queue}
        return self._send("POST", _path(session, "/fork"), json=body, key=key)

    def move(self, session: str, worker: str | None = None) -> JsonObject:
        """Have a session go on in another worker, in the one named or in the one that is chosen."""
        return self._send("POST", _path(session, "/move"), json={"worker": worker})

    def delete(self, session: str, *, key: str | None = None) -> None:
        """Forget a session."""
        self._send("DELETE", _path(session), key=key)

    def turn(
        self,
        session: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        key: str | None = None,
        **options: Any,
    ) -> JsonObject:
        """Send a turn and wait for its end.

        Options: generate, queue, repair, wait_for_repairs, sampling, fidelity.
        """
        body = {**options, "messages": list(messages)}
        return self._send("POST", _path(session, "/turns"), json=body, key=key)

    def turn_stream(
        self,
        session: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        key: str | None = None,
        **options: Any,
    ) -> Iterator[StreamEvent]:
        """Send a turn and follow it. The last event is `done`; anything else raises. Closing it early cancels."""
        body = {**options, "messages": list(messages), "stream": True}
        try:
            with self._http.stream(
                "POST", _path(session, "/turns"), json=body, headers=_headers(key)
            ) as response:
                if response.is_error:
                    response.read()
                    raise _problem(response)
                yield from _until_done(_events(response.iter_lines()))
        except httpx.TransportError as error:
            raise KvrecallError(0, "connection_failed", str(error)) from error

    def event(
        self, session: str, type: str, call_id: str, *, key: str | None = None, **fields: Any
    ) -> JsonObject:
        """Report on a tool call.

        Fields: `result` of tool_call.completed and .failed, `delta` and perhaps `index` of .delta, perhaps
        `arguments` of .started.
        """
        body = {**fields, "type": type, "call_id": call_id}
        return self._send("POST", _path(session, "/events"), json=body, key=key)

    def memory(self, session: str) -> JsonObject:
        """What a session holds now."""
        return self._send("GET", _path(session, "/memory"))

    def episodes(self, session: str) -> JsonObject:
        """A session's episodes: size, medoid, how often a turn was about each, which is active."""
        return self._send("GET", _path(session, "/episodes"))

    def repairs(self, session: str, limit: int = 10) -> JsonObject:
        """A session's last repairs, newest first, with the text around what they brought back."""
        return self._send("GET", _path(session, "/repairs"), params={"limit": limit})

    def methods(self) -> JsonObject:
        """The eviction methods of the service, and how it repairs: `methods` and `repair`."""
        return self._send("GET", "/v1/methods")

    def worker(self) -> JsonObject:
        """The model that is served, and its limits."""
        return self._send("GET", "/v1/worker")

    def workers(self) -> JsonObject:
        """The workers that can be reached, with what each has to do: `workers`."""
        return self._send("GET", "/v1/workers")

    def ready(self) -> bool:
        """Whether the service takes requests."""
        try:
            return self._http.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def _send(
        self, method: str, path: str, *, key: str | None = None, **content: Any
    ) -> JsonObject:
        answer: JsonObject = self._answer(method, path, key=key, **content)
        return answer

    def _answer(self, method: str, path: str, *, key: str | None = None, **content: Any) -> Any:
        """`content` as httpx takes it: json, params."""
        try:
            response = self._http.request(method, path, headers=_headers(key), **content)
        except httpx.TransportError as error:
            raise KvrecallError(
                0, "connection_failed", str(error) or type(error).__name__
            ) from error
        if response.is_error:
            raise _problem(response)
        return response.json() if response.content else {}


def _path(session: str, rest: str = "") -> str:
    return f"/v1/sessions/{quote(session, safe='')}{rest}"


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Idempotency-Key": key}


def _problem(response: httpx.Response) -> KvrecallError:
    try:
        members = response.json()
    except ValueError:
        members = {}
    if not isinstance(members, dict):
        members = {}
    detail = members.get("detail") or response.reason_phrase
    return KvrecallError(response.status_code, members.get("code", "http_error"), detail, members)


def _events(lines: Iterable[str]) -> Iterator[StreamEvent]:
    """Server-sent events out of lines; comments are passed over."""
    event = ""
    data: Sequence[str] = ()
    for line in lines:
        name, _, value = line.partition(":")
        if line == "" and data:
            yield StreamEvent(event, json.loads("\n".join(data)))
            event = ""
            data = ()
        elif name == "event":
            event = value.removeprefix(" ")
        elif name == "data":
            data = (*data, value.removeprefix(" "))


def _until_done(events: Iterator[StreamEvent]) -> Iterator[StreamEvent]:
    """The events up to `done`. An `error` event raises, and so does a stream that breaks off."""
    for event in events:
        if event.event == "error":
            members = event.data
            raise KvrecallError(members["status"], members["code"], members["detail"], members)
        yield event
        if event.event == "done":
            return
    raise KvrecallError(0, "stream_broken", "the stream of the turn ended without done or error")
