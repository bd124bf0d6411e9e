"""The session API's calls as the contract has them, and REST's client."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import httpx

Json = dict[str, Any]


class Refused(Exception):
    """A refused request: its code, the fields at fault, and whether a retry is advised."""

    def __init__(self, code: str, fields: list[str], retry: bool) -> None:
        super().__init__(code, fields)
        self.code = code
        self.fields = fields
        self.retry = retry


class Client(Protocol):
    """Calls of the session API. `key` is an idempotency key. Raise Refused."""

    tenant: str

    async def create(self, body: Json | None = None, key: str = "") -> Json:
        """Create a session."""
        ...

    async def get(self, session: str) -> Json:
        """Get a session."""
        ...

    async def page(self, **query: Any) -> Json:
        """List sessions: `limit`, `cursor`."""
        ...

    async def delete(self, session: str, key: str = "") -> None:
        """Delete a session."""
        ...

    async def fork(self, session: str, body: Json | None = None, key: str = "") -> Json:
        """Fork a session."""
        ...

    async def move(self, session: str, body: Json | None = None) -> Json:
        """Move a session."""
        ...

    async def turn(self, session: str, body: Json, key: str = "") -> Json:
        """Send a turn."""
        ...

    async def stream(self, session: str, body: Json, key: str = "") -> list[tuple[str, Any]]:
        """Send a turn; its events as pairs of REST's name and data."""
        ...

    async def begin_stream(self, session: str, body: Json) -> "Begun":
        """Send a turn and read its first event."""
        ...

    async def event(self, session: str, body: Json, key: str = "") -> Json:
        """Report a tool event."""
        ...

    async def read(self, session: str, what: str, **query: Any) -> Json:
        """Get a session's `memory`, `repairs` or `episodes`."""
        ...

    async def describe(self, what: str) -> Json:
        """Get `worker`, `workers` or `methods`."""
        ...


class RestClient:
    """The session API over HTTP."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.tenant = ""

    async def create(self, body: Json | None = None, key: str = "") -> Json:
        """Create a session."""
        return await self._send("POST", "", body or {}, key)

    async def get(self, session: str) -> Json:
        """Get a session."""
        return await self._send("GET", f"/{session}")

    async def page(self, **query: Any) -> Json:
        """List sessions."""
        return await self._send("GET", "", query=query)

    async def delete(self, session: str, key: str = "") -> None:
        """Delete a session."""
        await self._send("DELETE", f"/{session}", key=key)

    async def fork(self, session: str, body: Json | None = None, key: str = "") -> Json:
        """Fork a session."""
        return await self._send("POST", f"/{session}/fork", body or {}, key)

    async def move(self, session: str, body: Json | None = None) -> Json:
        """Move a session."""
        return await self._send("POST", f"/{session}/move", body or {})

    async def turn(self, session: str, body: Json, key: str = "") -> Json:
        """Send a turn."""
        return await self._send("POST", f"/{session}/turns", body, key)

    async def stream(self, session: str, body: Json, key: str = "") -> list[tuple[str, Any]]:
        """Send a turn; its events."""
        answer = await self._request("POST", f"/{session}/turns", {**body, "stream": True}, key)
        return parse_events(answer.text)

    async def begin_stream(self, session: str, body: Json) -> "Begun":
        """Send a turn and read its first event."""
        sending = self._http.stream(
            "POST", f"/v1/sessions/{session}/turns", json={**body, "stream": True}
        )
        answer = await sending.__aenter__()
        await anext(answer.aiter_bytes())
        return Begun(lambda: sending.__aexit__(None, None, None))

    async def event(self, session: str, body: Json, key: str = "") -> Json:
        """Report a tool event."""
        return await self._send("POST", f"/{session}/events", body, key)

    async def read(self, session: str, what: str, **query: Any) -> Json:
        """Get a session's memory, repairs or episodes."""
        return await self._send("GET", f"/{session}/{what}", query=query)

    async def describe(self, what: str) -> Json:
        """Get the worker, the workers or the methods."""
        return await self._send("GET", f"/../{what}")

    async def _send(
        self, method: str, path: str, body: Json | None = None, key: str = "", query: Any = None
    ) -> Json:
        answer = await self._request(method, path, body, key, query)
        found: Json = answer.json() if answer.content else {}
        return found

    async def _request(
        self, method: str, path: str, body: Json | None, key: str, query: Any = None
    ) -> httpx.Response:
        headers = {"Idempotency-Key": key} if key else {}
        if self.tenant:
            headers["X-Kvrecall-Tenant"] = self.tenant
        url = f"/v1/sessions{path}".replace("sessions/../", "")
        answer = await self._http.request(method, url, json=body, headers=headers, params=query)
        if answer.is_error:
            problem = answer.json()
            violations = problem.get("errors") or [problem]
            fields = [each["field"] for each in violations if each.get("field")]
            retry = "Retry-After" in answer.headers
            raise Refused(problem["code"], [_drop_tag(field) for field in fields], retry)
        return answer


class Begun:
    """A stream whose first event was read; `abandon` goes away before its end."""

    def __init__(self, abandon: Callable[[], Awaitable[Any]]) -> None:
        self.abandon = abandon


def _drop_tag(field: str) -> str:
    """Drop the kind of a tool event from REST's path: gRPC has a message for each."""
    head, _, rest = field.partition(".")
    return rest.partition(".")[2] if head == "tool_call" and rest else field


def parse_events(text: str) -> list[tuple[str, Any]]:
    """Parse server-sent events into names and data. Raises Refused for an error event."""
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    fields = [
        dict(line.split(": ", 1) for line in block if not line.startswith(":")) for block in blocks
    ]
    events = [(field["event"], json.loads(field["data"])) for field in fields if field]
    if events and events[-1][0] == "error":
        raise Refused(events[-1][1]["code"], [], False)
    return events
