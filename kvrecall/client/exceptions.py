"""Exceptions of the client.

KvrecallError
├── ConnectionFailed    no response: refused, timed out, broken off
│   └── StreamBroken    a stream ended without its last event
├── InvalidResponse     a response that this version of the client cannot parse
└── ServiceProblem      an RFC 9457 problem of the service
    ├── InvalidRequest  400, 405, 408, 413, 415, 421, 422: the request violates the API or a limit
    ├── AccessDenied    401, 403: no valid key, or one without this right
    ├── NotFound        404: unknown session, tool call, turn or route
    ├── Conflict        409: busy session, outstanding tool calls, another result
    ├── QuotaExceeded   429: the tenant's quota is reached
    ├── Overloaded      429, 503: retry later, after `retry_after_seconds`
    └── ServerError     500 and others: the cause is in the service's log
"""

from collections.abc import Mapping
from typing import Any


class KvrecallError(Exception):
    """Base of all errors of the client.

    `code` is stable, `detail` is for people. `status` is the HTTP status, 0 without a response.
    `details` are further members of the problem, e.g. the `field` and its `limit`.
    """

    def __init__(
        self, detail: str, code: str, status: int = 0, details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(f"{detail} ({status} {code})")
        self.status = status
        self.code = code
        self.detail = detail
        self.details = dict(details or {})


class ConnectionFailed(KvrecallError):
    """No response: the connection was refused, timed out or broke off."""

    def __init__(self, detail: str, code: str = "connection_failed") -> None:
        super().__init__(detail, code)


class StreamBroken(ConnectionFailed):
    """The stream of a turn ended without `done` or `error`; the turn may be committed.

    Repeat the turn with the same idempotency key to get its outcome.
    """

    def __init__(self) -> None:
        super().__init__("the stream of the turn ended without done or error", "stream_broken")


class InvalidResponse(KvrecallError):
    """The response is not what the API describes: another service, or an incompatible version."""

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail, "invalid_response", status)


class ServiceProblem(KvrecallError):
    """The service responded with a problem."""

    def __init__(
        self,
        detail: str,
        code: str,
        status: int,
        details: Mapping[str, Any] | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(detail, code, status, details)
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(ServiceProblem):
    """The request violates the API or a limit; nothing was changed."""


class AccessDenied(ServiceProblem):
    """The service needs a key: there was none, or it is not valid, or lacks this right."""


class NotFound(ServiceProblem):
    """The session, tool call, turn or route does not exist."""


class Conflict(ServiceProblem):
    """The session's state does not allow the request; for now, where `retry_after_seconds` is given."""


class QuotaExceeded(ServiceProblem):
    """The tenant's quota is reached; delete sessions first."""


class Overloaded(ServiceProblem):
    """The service cannot take the request now; retry after `retry_after_seconds`, if given."""


class ServerError(ServiceProblem):
    """An error of the service; its log has the request's id."""


_CLASS_BY_STATUS: Mapping[int, type[ServiceProblem]] = {
    400: InvalidRequest,
    401: AccessDenied,
    403: AccessDenied,
    404: NotFound,
    405: InvalidRequest,
    408: InvalidRequest,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    421: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    503: Overloaded,
}
_STANDARD_MEMBERS = frozenset({"type", "title", "status", "detail", "code"})


def build_problem(
    status: int, members: Mapping[str, Any], reason: str, retry_after_seconds: float | None = None
) -> ServiceProblem:
    """Build the exception of a problem; `reason` is the detail of a response that has none."""
    code = str(members.get("code", "http_error"))
    kind = QuotaExceeded if code == "quota_exceeded" else _CLASS_BY_STATUS.get(status, ServerError)
    details = {name: value for name, value in members.items() if name not in _STANDARD_MEMBERS}
    detail = str(members.get("detail") or reason)
    return kind(detail, code, status, details, retry_after_seconds)
