"""Calls of the REST API that look into sessions."""

from collections.abc import Mapping
from urllib.parse import quote

from kvrecall.client._calls import Call, SessionInput, get_id
from kvrecall.client._parsing import parse
from kvrecall.client.inspection import (
    Family,
    MemoryMap,
    MemoryTokens,
    Overview,
    Pause,
    Pauses,
    TurnLog,
    Version,
)


def turns(session: SessionInput, after: int, limit: int) -> Call[TurnLog]:
    """GET /v1/sessions/{session}/turns."""
    params = {"after": after, "limit": limit}
    return Call("GET", _path(session, "/turns"), lambda data: parse(TurnLog, data), params=params)


def memory_map(
    session: SessionInput, start: int, stop: int | None, columns: int, head: int | None
) -> Call[MemoryMap]:
    """GET /v1/sessions/{session}/memory/map."""
    params = _leave_out({"start": start, "stop": stop, "columns": columns, "head": head})
    path = _path(session, "/memory/map")
    return Call("GET", path, lambda data: parse(MemoryMap, data), params=params)


def memory_tokens(session: SessionInput, start: int, stop: int | None) -> Call[MemoryTokens]:
    """GET /v1/sessions/{session}/memory/tokens."""
    params = _leave_out({"start": start, "stop": stop})
    path = _path(session, "/memory/tokens")
    return Call("GET", path, lambda data: parse(MemoryTokens, data), params=params)


def family(session: SessionInput) -> Call[Family]:
    """GET /v1/sessions/{session}/family."""
    return Call("GET", _path(session, "/family"), lambda data: parse(Family, data))


def pauses(session: SessionInput, limit: int) -> Call[tuple[Pause, ...]]:
    """GET /v1/sessions/{session}/pauses."""
    return Call(
        "GET",
        _path(session, "/pauses"),
        lambda data: parse(Pauses, data).pauses,
        params={"limit": limit},
    )


def overview() -> Call[Overview]:
    """GET /v1/overview."""
    return Call("GET", "/v1/overview", lambda data: parse(Overview, data))


def version() -> Call[Version]:
    """GET /version."""
    return Call("GET", "/version", lambda data: parse(Version, data))


def watch(session: SessionInput | None) -> Call[None]:
    """GET /v1/stream, or that of a session."""
    path = "/v1/stream" if session is None else _path(session, "/stream")
    return Call("GET", path, lambda _: None)


def _leave_out(params: Mapping[str, int | None]) -> dict[str, str | int]:
    """Leave out parameters that are None."""
    return {name: value for name, value in params.items() if value is not None}


def _path(session: SessionInput, suffix: str) -> str:
    return f"/v1/sessions/{quote(get_id(session), safe='')}{suffix}"
