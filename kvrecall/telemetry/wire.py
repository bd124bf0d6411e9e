"""Ids that cross the wire between processes: of the request, and of its trace."""

import re
from collections.abc import Mapping

import structlog

from kvrecall.telemetry.spans import NO_SPAN, Kind, PassedSpan, Span

REQUEST_ID_KEY = "x-request-id"
"""Key in the metadata of calls to a worker; its value is the id of the client's request."""
TRACE_KEYS = ("traceparent", "tracestate")
"""Keys of W3C trace context, in HTTP requests and in the metadata of calls."""

_PLAIN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_TRACE_STATE = re.compile(r"[\x20-\x7e]{1,512}")

Metadata = tuple[tuple[str, str], ...]


def get_request_id() -> str:
    """Return the id of the client's request that is handled, empty outside of one."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def write_ids(span: Span) -> Metadata:
    """Build the metadata of a call that is made under `span`, for the request being handled."""
    request_id = get_request_id()
    ids = {REQUEST_ID_KEY: request_id} if request_id else {}
    return tuple((ids | span.headers()).items())


def read_request_id(metadata: Mapping[str, str]) -> str:
    """Return the id of the client's request, empty if a call came without one."""
    found = metadata.get(REQUEST_ID_KEY, "")
    return found if _PLAIN_ID.fullmatch(found) else ""


def read_trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the trace context of a request, empty where there is none or it is malformed.

    It is handed on: what is no plain text would be refused by the next process.
    """
    found = {name: value.strip() for name, value in headers.items() if name in TRACE_KEYS}
    parent = _TRACE_PARENT.fullmatch(found.get("traceparent", ""))
    if parent is None or not parent[1].strip("0") or not parent[2].strip("0"):
        return {}
    if not _TRACE_STATE.fullmatch(found.get("tracestate", "")):
        found.pop("tracestate", None)
    return found


class PassingTracer:
    """A tracer that makes no spans: it hands the caller's on, and log lines have its trace's id."""

    def begin(self, name: str, kind: Kind, headers: Mapping[str, str]) -> Span:
        """Return the caller's span, or none."""
        passed = read_trace_headers(headers)
        return PassedSpan(passed["traceparent"].split("-")[1], passed) if passed else NO_SPAN

    def close(self, seconds: float) -> None:
        """Do nothing."""
