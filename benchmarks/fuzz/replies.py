"""Checks of replies: what no request may get back, whatever it was."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.fuzz.findings import Problem
from benchmarks.fuzz.requests import Cut, Reply, Request
from gateway.anthropic.errors import ANTHROPIC_FORMAT
from gateway.openai.errors import OPENAI_FORMAT
from kvrecall.domain.codes import ErrorCode

# Codes of 503 that can be true while workers, catalog and disks are whole, and why.
TRUE_CAUSES: Mapping[str, str] = MappingProxyType(
    {
        ErrorCode.CHANGED_MEANWHILE: "another request wrote the same session at the same time",
        ErrorCode.CANCELLED: "the session was deleted, or its client left, while the turn ran",
        ErrorCode.SESSION_NOT_OPEN: "the session was moved or deleted while the request ran",
    }
)
# Time limit of a reply in seconds, also on a busy machine.
SECONDS = 120.0
# Words of tracebacks, panics and paths; no request of the fuzzer has them.
_INTERNALS = re.compile(
    rb"Traceback \(most recent|panicked at|panic:|<backtrace>|RUST_BACKTRACE|stack backtrace"
    rb"|site-packages|File \\?\"/|/usr/lib|/home/|\.py\\?\", line|\.rs:\d"
)
_PROBLEM_MEMBERS = {"type": str, "title": str, "status": int, "detail": str, "code": str}
_OPENAI_MEMBERS = ("message", "type", "param", "code")


class Checker:
    """Checks replies to a tenant; `secrets` are texts that only another tenant may read."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        self._secrets = [secret.encode() for secret in secrets]

    def check_http(self, request: Request, reply: Reply) -> list[Problem]:
        """Return what is wrong with the reply to an HTTP request."""
        return [*self._check_any(request, reply), *_check_http(request, reply)]

    def check_call(self, request: Request, reply: Reply) -> list[Problem]:
        """Return what is wrong with the end of a gRPC call."""
        return [*self._check_any(request, reply), *_check_call(reply)]

    def _check_any(self, request: Request, reply: Reply) -> Iterator[Problem]:
        if reply.error and (request.cut is Cut.NONE or reply.status == "none"):
            yield Problem(f"no whole reply: {reply.error.partition('(')[0]}", reply.error)
        if reply.seconds > SECONDS:
            yield Problem("late reply", f"{reply.status} after {reply.seconds:.0f} s")
        if match := _INTERNALS.search(reply.body):
            yield Problem("internals in a reply", _around(reply.body, match.start()))
        for secret in self._secrets:
            if secret in reply.body:
                yield Problem("another tenant's text", _around(reply.body, reply.body.find(secret)))


def _around(body: bytes, at: int) -> str:
    return body[max(0, at - 200) : at + 400].decode("utf-8", "replace")


def _check_http(request: Request, reply: Reply) -> Iterator[Problem]:
    if not reply.status.isdecimal() or (request.cut is not Cut.NONE and reply.error):
        return
    status = int(reply.status)
    if "event-stream" in reply.content_type:
        yield from _check_stream(reply.body)
        return
    if "json" not in reply.content_type:
        if status >= 400:
            yield Problem(f"an error {status} without JSON", _around(reply.body, 0))
        return
    try:
        members = json.loads(reply.body.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        if request.cut is Cut.NONE:
            yield Problem("a reply that is no JSON", f"{error}: {_around(reply.body, 0)}")
        return
    if status >= 400:
        yield from _check_error(request.path.partition("?")[0], status, members)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _check_error(path: str, status: int, members: Any) -> Iterator[Problem]:
    """Check an error in the form of its API, and the code of a 5xx."""
    shown = json.dumps(members)
    error = members.get("error") if isinstance(members, dict) else None
    if OPENAI_FORMAT.covers(path):
        formed = isinstance(error, dict) and all(name in error for name in _OPENAI_MEMBERS)
    elif ANTHROPIC_FORMAT.covers(path):
        formed = isinstance(error, dict) and isinstance(error.get("message"), str)
    else:
        error = members
        formed = isinstance(error, dict) and all(
            isinstance(error.get(name), kind) for name, kind in _PROBLEM_MEMBERS.items()
        )
        formed = formed and error["status"] == status
    if not formed:
        yield Problem("an error without the form of its API", shown)
        return
    assert isinstance(error, dict), "it is formed"
    code = str(error.get("code") or error.get("type"))
    if status >= 500 and not (status == 503 and code in TRUE_CAUSES):
        yield Problem(f"{status} {code}", shown)


def _check_stream(body: bytes) -> Iterator[Problem]:
    """Check that every event of a stream is JSON, and no error in it one of the server's."""
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            event = json.loads(data.decode("utf-8"), parse_constant=_refuse)
        except ValueError as error:
            yield Problem("an event that is no JSON", f"{error}: {_around(data, 0)}")
            return
        if isinstance(event, dict) and (code := _find_code(event)) is not None:
            yield Problem(f"a stream that ends with {code}", _around(data, 0))


def _find_code(event: Mapping[str, Any]) -> str | None:
    """Return the code of an event's error if it is one of the server that nothing excuses."""
    response = event.get("response")
    error = event.get("error") or (response.get("error") if isinstance(response, dict) else None)
    found = error if isinstance(error, dict) else event
    code = found.get("code")
    known = next((each for each in ErrorCode if each == code), None)
    if known is not None and known.http_status >= 500 and code not in TRUE_CAUSES:
        return str(code)
    return (
        str(found["type"])
        if found.get("type") in ("server_error", "api_error") and code not in TRUE_CAUSES
        else None
    )


def _check_call(reply: Reply) -> Iterator[Problem]:
    if reply.status in ("UNKNOWN", "INTERNAL", "DATA_LOSS"):
        yield Problem(f"{reply.status} {reply.code}".strip(), _around(reply.body, 0))
    if reply.status == "UNAVAILABLE" and reply.code not in TRUE_CAUSES:
        yield Problem(f"UNAVAILABLE {reply.code}".strip(), _around(reply.body, 0))
