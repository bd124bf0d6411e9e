"""Errors of the gRPC API: `google.rpc.Status` with the codes and fields of the REST API's problems.

The size of a status is bounded: it travels in trailing metadata, of which clients take 8 KiB.
"""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from gateway.grpc.convert import find_field
from kvrecall.domain.codes import ErrorCode
from kvrecall.protocol.sessions_v1 import ERROR_DOMAIN
from services.access.keys import redact_keys

# In UTF-8 bytes. The message is sent twice: in the status, and percent-encoded in `grpc-message`.
_MAX_MESSAGE = 400
_MAX_TEXT = 140
_MAX_FIELD = 100
_MAX_ENTRIES = 8
# Members of a problem that a status has elsewhere.
_NO_DETAILS = frozenset({"type", "title", "status", "detail", "code", "field", "errors"})


class CallRefused(Exception):
    """A call that reaches no service; `problem` has the members of the problem."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        super().__init__(problem["detail"])
        self.problem = problem


def get_status_code(code: ErrorCode) -> grpc.StatusCode:
    """Return the status of an error code for clients.

    `UNAVAILABLE`, which clients retry, for all that HTTP answers with 503; the codes' own statuses
    distinguish further, between workers and gateways.
    """
    if code.http_status == 503:
        return grpc.StatusCode.UNAVAILABLE
    if code.http_status == 500:
        return grpc.StatusCode.INTERNAL
    return grpc.StatusCode[code.grpc_status]


def build_status(
    problem: Mapping[str, Any],
    descriptor: Descriptor,
    request_id: str,
    retry_seconds: float | None = None,
) -> Status:
    """Build the status of a problem; `descriptor` is of the request, whose fields it names."""
    code = ErrorCode.parse(problem["code"])
    number: int = get_status_code(code).value[0]
    violations = _list_violations(problem, descriptor)
    detail = problem["detail"]
    if problem.get("errors") and violations:
        detail = f"{violations[0].field}: {violations[0].description}"
    status = Status(code=number, message=_cut(detail, _MAX_MESSAGE))
    _add(status, _build_info(code, problem))
    if violations:
        _add(status, BadRequest(field_violations=violations))
    if retry_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(round(retry_seconds * 1e9))
        _add(status, RetryInfo(retry_delay=delay))
    _add(status, RequestInfo(request_id=request_id))
    return status


def _add(status: Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _build_info(code: ErrorCode, problem: Mapping[str, Any]) -> ErrorInfo:
    """Build the machine-readable reason, with what else a client may act on: limit, calls, ..."""
    others = [(name, value) for name, value in problem.items() if name not in _NO_DETAILS]
    return ErrorInfo(
        reason=code.name,
        domain=ERROR_DOMAIN,
        metadata={name: _cut(_to_text(value), _MAX_TEXT) for name, value in others[:_MAX_ENTRIES]},
    )


def _list_violations(
    problem: Mapping[str, Any], descriptor: Descriptor
) -> list[BadRequest.FieldViolation]:
    """List the fields at fault: those of a violated schema, or the one that the service names."""
    found = problem.get("errors") or [{"field": problem.get("field"), "message": problem["detail"]}]
    return [
        BadRequest.FieldViolation(
            field=_cut(find_field(descriptor, each["field"]), _MAX_FIELD),
            description=_cut(each["message"], _MAX_TEXT),
        )
        for each in found[:_MAX_ENTRIES]
        if each["field"]
    ]


def _to_text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _cut(text: str, size: int) -> str:
    """Cut a text to a number of bytes, without the keys that a client sent in the wrong place."""
    return redact_keys(text).encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
