"""Error responses: every error as RFC 9457 problem details, with the status of its error code.

The routes of other vendors' APIs answer the same errors in their own forms: the application has a
`VendorFormat` for each such API.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvrecall.domain import errors
from kvrecall.domain.codes import ErrorCode
from services.access.keys import redact_keys

# Of a schema in the OpenAPI description.
SCHEMA_PATH = "#/components/schemas/{model}"
PROBLEM_JSON = "application/problem+json"

# Retry-After of errors that do not name one themselves.
RETRY_AFTER_SECONDS = 1.0


CATALOG_FAILED = "the catalog failed or cannot be reached; the reason was logged"
CATALOG_FULL = (
    "the catalog stores no more, as its disk or memory is nearly full; deletions go on: delete "
    "sessions, conversations or responses"
)


CATALOG_REPLACED = (
    "the catalog's data are gone or are another catalog's: nothing is read or written until the "
    "operator has brought them back; send the request again later"
)


# Their clients repeat 408, 409, 429 and 5xx by themselves: what a retry cannot help is a 400.
_VENDOR_STATUSES: Mapping[str, int] = {
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.LIMIT_EXCEEDED: 400,
    ErrorCode.BUDGET_OUT_OF_RANGE: 400,
    ErrorCode.UNKNOWN_METHOD: 400,
    ErrorCode.UNKNOWN_MODEL: 404,
    ErrorCode.EMPTY_TURN: 400,
    ErrorCode.TURN_TOO_LONG: 400,
    ErrorCode.DUPLICATE_CALL: 400,
    ErrorCode.EPISODES_UNSUPPORTED: 400,
    ErrorCode.BAD_SETTINGS: 400,
    ErrorCode.BAD_MESSAGES: 400,
    ErrorCode.TOOL_RESULT_WITHOUT_CALL: 400,
    ErrorCode.CALLS_OUTSTANDING: 400,
    ErrorCode.RESULT_CONFLICT: 400,
    ErrorCode.IDEMPOTENCY_CONFLICT: 400,
    ErrorCode.WORKER_REFUSED: 400,
}


@dataclass(frozen=True)
class Overflow:
    """A conversation that is longer than the model's context, in tokens."""

    tokens: int
    limit: int


def find_overflow(problem: Mapping[str, Any]) -> Overflow | None:
    """Return what a problem says of a conversation over the model's context; None for another one."""
    if problem["code"] != ErrorCode.TURN_TOO_LONG or "tokens" not in problem:
        return None
    return Overflow(problem["tokens"], problem["limit"])


def _build_no_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    return []


@dataclass(frozen=True)
class VendorFormat:
    """The form of another vendor's API, for answers of the routes of that API.

    Attributes:
        name: Of the vendor, in lower case.
        paths: The beginnings of its routes' paths, each with a slash at the end.
        error_body: Schema of the bodies of its responses with an error.
        to_error: Converts the members of a problem to its error object.
        build_headers: Builds headers that each of its answers has, from the seconds to its first byte.
    """

    name: str
    paths: tuple[str, ...]
    error_body: type[BaseModel]
    to_error: Callable[[Mapping[str, Any]], dict[str, Any]]
    build_headers: Callable[[float], list[tuple[bytes, bytes]]] = _build_no_headers

    def covers(self, path: str) -> bool:
        """Return whether a path belongs to this API."""
        return f"{path}/".startswith(self.paths)


def find_format(scope: Scope) -> VendorFormat | None:
    """Return the form of the API that a request is for; None for the service's own API."""
    formats: Sequence[VendorFormat] = scope["app"].state.vendor_formats
    return next((each for each in formats if each.covers(scope["path"])), None)


def get_vendor_status(problem: Mapping[str, Any]) -> int:
    """Return the HTTP status of a problem in another vendor's API."""
    return int(_VENDOR_STATUSES.get(problem["code"], problem["status"]))


class Problem(BaseModel):
    """Problem details (RFC 9457). `code` and `type` are stable; more members depend on the code."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:kvrecall:problem:unknown-session"])
    title: str
    status: int
    detail: str
    code: str


class _RedactedResponse(JSONResponse):
    """JSON without keys: an error may repeat what a client has sent in the wrong place."""

    def render(self, content: Any) -> bytes:
        """Encode the content, with the secrets of keys replaced."""
        return redact_keys(bytes(super().render(content)).decode()).encode()


class RefusedRequest(HTTPException):
    """A request that was refused outside of its route, where the framework passes only its own on.

    `members` are those of the problem.
    """

    def __init__(
        self, members: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(members["status"], members["detail"], headers)
        self.members = members


def build_problem(
    code: ErrorCode,
    detail: str,
    details: Mapping[str, Any] | None = None,
    status: int | None = None,
) -> dict[str, Any]:
    """Build the members of a problem; `status` is that of the code unless it is given."""
    status = code.http_status if status is None else status
    return {
        "type": f"urn:kvrecall:problem:{code.replace('_', '-')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": str(code),
        **(details or {}),
    }


def to_problem(error: errors.ServiceError) -> dict[str, Any]:
    """Convert a domain error to the members of a problem.

    A failure of the catalog may name servers and files: it is logged, not sent. That it does not
    answer was logged where it began.
    """
    if isinstance(error, errors.CatalogError):
        if not isinstance(error, errors.CatalogUnreachable):
            structlog.get_logger("kvrecall.gateway").warning("catalog failed", reason=error.message)
        return build_problem(error.code, _describe(error))
    return build_problem(error.code, error.message, error.details)


def _describe(error: errors.CatalogError) -> str:
    """Return what a client may know of the catalog's failure."""
    if isinstance(error, errors.CatalogReplaced):
        return CATALOG_REPLACED
    return CATALOG_FULL if isinstance(error, errors.StorageFull) else CATALOG_FAILED


def error_response(
    scope: Scope, members: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Build a response from the members of a problem, in the form of the API of the request."""
    vendor = find_format(scope)
    media_type = None
    if vendor is not None:
        content, status = vendor.to_error(members), get_vendor_status(members)
    else:
        content, status, media_type = dict(members), members["status"], PROBLEM_JSON
    sent = dict(headers or {})
    if not _may_pass(members["code"], status):
        sent["x-should-retry"] = "false"
    return _RedactedResponse(content, status, sent, media_type=media_type)


def _may_pass(code: str, status: int) -> bool:
    """Return whether an error may be gone when the request comes again."""
    if status >= 500:
        return code != ErrorCode.WORKER_ERROR
    if status == 409:
        return code in (ErrorCode.SESSION_BUSY, ErrorCode.STALE_EPOCH)
    return status in (408, 429) and code != ErrorCode.QUOTA_EXCEEDED


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the problem responses of a route for OpenAPI."""
    return describe_errors(Problem, PROBLEM_JSON, *statuses)


def describe_errors(
    body: type[BaseModel], media_type: str, *statuses: int
) -> dict[int | str, dict[str, Any]]:
    """Describe responses with an error of a route for OpenAPI, by a reference to the body's schema.

    The application adds the schema once. FastAPI would build it anew for each status of each route.
    """
    reference = {"$ref": SCHEMA_PATH.format(model=body.__name__)}
    content = {media_type: {"schema": reference}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


async def on_service_error(request: Request, error: errors.ServiceError) -> JSONResponse:
    """Respond to a domain error."""
    return service_error_response(request.scope, error)


def service_error_response(scope: Scope, error: errors.ServiceError) -> JSONResponse:
    """Build the response to a domain error, with the headers that tell a client what to do."""
    members = to_problem(error)
    return error_response(scope, members, _build_headers(error, members["status"]))


def _build_headers(error: errors.ServiceError, status: int) -> dict[str, str]:
    """Build the headers of an error: when to try again, how to authenticate."""
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    seconds = get_retry_seconds(error)
    if seconds is None:
        return {}
    return {"Retry-After": str(ceil(seconds)), "retry-after-ms": str(ceil(1000 * seconds))}


def get_retry_seconds(error: errors.ServiceError) -> float | None:
    """Return the time after which a transient error may be gone; None for one that stays."""
    if isinstance(error, errors.QuotaExceeded):
        return None
    if error.code.http_status not in (429, 503) and not isinstance(error, errors.SessionBusy):
        return None
    if isinstance(error, errors.Overloaded):
        return error.retry_after_seconds
    return RETRY_AFTER_SECONDS


async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    """Respond to a body, path or query that violates its schema with each field and its limit."""
    items = [{**item, "loc": item["loc"][1:]} for item in error.errors()]
    if items[0]["type"] == "model_attributes_type" and not items[0]["loc"]:
        items[0]["msg"] = _describe_no_object(request.headers.get("content-type", ""))
    return error_response(request.scope, build_violations_problem(items))


def _describe_no_object(content_type: str) -> str:
    """Describe a body that is no object: other than JSON is not read, and reaches a route as text."""
    if content_type.partition(";")[0].strip().lower().endswith("json"):
        return "the body should be a JSON object"
    return (
        f"the body has content-type {content_type[:40]!r}; expected a JSON object with "
        "content-type application/json"
    )


def build_violations_problem(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Build the members of a problem from pydantic's errors: each field and its limit."""
    violations = [_to_violation(item) for item in items]
    first = violations[0]
    detail = f"{first['field']}: {first['message']}" if first["field"] else str(first["message"])
    details = {"field": first["field"], "errors": violations}
    return build_problem(ErrorCode.INVALID_REQUEST, detail, details)


def _to_violation(item: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pydantic error: the field as a path (`messages[0].role`), message and limits.

    The message never quotes the value: pydantic's does for a tag that selects among schemas.
    """
    field = ""
    message = item["msg"]
    if item["type"] == "union_tag_invalid":
        message = f"{item['ctx']['discriminator']} should be {item['ctx']['expected_tags']}"
    for part in item["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    limits = {
        name: value
        for name, value in item.get("ctx", {}).items()
        if isinstance(value, int | float | str) and name != "tag"
    }
    return {"field": field.lstrip("."), "message": message, "limits": limits}


async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Respond to an error of the framework: an unknown route, a wrong method."""
    codes = {404: ErrorCode.UNKNOWN_ROUTE, 405: ErrorCode.METHOD_NOT_ALLOWED}
    if isinstance(error, RefusedRequest):
        return error_response(request.scope, error.members, error.headers)
    code = codes.get(error.status_code, ErrorCode.HTTP_ERROR)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    members = build_problem(code, detail, status=error.status_code)
    return error_response(request.scope, members, error.headers)


def log_unexpected_error() -> dict[str, Any]:
    """Log the exception being handled and build a problem without internals.

    To be called in an `except` block. The log line has the request id bound by the middleware.
    """
    structlog.get_logger("kvrecall.gateway").exception("unexpected error")
    return build_problem(
        ErrorCode.INTERNAL_ERROR, "an unexpected error; it was logged with the request id"
    )


Handler = Callable[[Request, Any], Awaitable[Response]]


def install_handlers(app: FastAPI, formats: Sequence[VendorFormat]) -> None:
    """Install the handlers of expected errors; the outermost middleware catches the others.

    `formats`: the forms of other vendors' APIs that the application has.
    """
    app.state.vendor_formats = formats
    handlers: dict[type[Exception], Handler] = {
        errors.ServiceError: on_service_error,
        RequestValidationError: on_validation_error,
        HTTPException: on_http_error,
    }
    for error_type, handler in handlers.items():
        app.add_exception_handler(error_type, handler)
