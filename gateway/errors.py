"""One table: what goes wrong behind the front door, as RFC 9457 problem details."""

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from math import ceil
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from kvrecall.domain import errors

PROBLEM_JSON = "application/problem+json"

STATUS_OF: Mapping[type[errors.ServiceError], int] = {
    errors.InvalidRequest: 422,
    errors.TurnTooLong: 413,
    errors.ToolResultWithoutCall: 409,
    errors.CallsOutstanding: 409,
    errors.ResultConflict: 409,
    errors.SessionBusy: 409,
    errors.WorkerUnavailable: 409,
    errors.StaleEpoch: 409,
    errors.IdempotencyConflict: 409,
    errors.UnknownSession: 404,
    errors.UnknownCall: 404,
    errors.UnknownTurn: 404,
    errors.QuotaExceeded: 429,
    errors.Overloaded: 429,
    errors.ShuttingDown: 503,
    errors.WorkerLost: 503,
    errors.CatalogError: 503,
    errors.ServiceError: 500,
}
STATUS_OF_REFUSAL: Mapping[str, int] = {
    "turn_too_long": 413,
    "stale_epoch": 409,
    "overloaded": 429,
    "cancelled": 503,
    "unknown_session": 503,
    "storage_failed": 503,
    "rows_missing": 500,
    "worker_error": 500,
}
RETRY_AFTER_SECONDS = 1.0


class Problem(BaseModel):
    """An error, as RFC 9457 describes it. `code` and `type` are stable; further members depend on the code."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["urn:kvrecall:problem:unknown-session"])
    title: str
    status: int
    detail: str
    code: str


def problem(
    status: int, code: str, detail: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The members of a problem."""
    return {
        "type": f"urn:kvrecall:problem:{code.replace('_', '-')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        **(details or {}),
    }


def status_of(error: errors.ServiceError) -> int:
    """The HTTP status of a domain error: that of the nearest class in the table."""
    if isinstance(error, errors.WorkerRefused):
        return STATUS_OF_REFUSAL.get(error.code, 422)
    return next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)


def problem_of(error: errors.ServiceError) -> dict[str, Any]:
    """The problem of a domain error."""
    return problem(status_of(error), error.code, error.message, error.details)


def problem_response(
    members: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """A response that is a problem."""
    return JSONResponse(
        dict(members),
        status_code=members["status"],
        headers=dict(headers or {}),
        media_type=PROBLEM_JSON,
    )


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's description: the problems it may answer with."""
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": content}
        for status in statuses
    }


async def on_service_error(request: Request, error: errors.ServiceError) -> JSONResponse:
    """Answer a domain error."""
    members = problem_of(error)
    headers = {}
    if members["status"] in (429, 503) and not isinstance(error, errors.QuotaExceeded):
        seconds = (
            error.retry_after_seconds
            if isinstance(error, errors.Overloaded)
            else RETRY_AFTER_SECONDS
        )
        headers["Retry-After"] = str(ceil(seconds))
    return problem_response(members, headers)


async def on_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    """Answer a body, path or query that does not fit its schema, naming each field and its limit."""
    found = [_violation(item) for item in error.errors()]
    first = found[0]
    detail = f"{first['field']}: {first['message']}" if first["field"] else str(first["message"])
    members = problem(422, "invalid_request", detail, {"field": first["field"], "errors": found})
    return problem_response(members)


def _violation(item: Mapping[str, Any]) -> dict[str, Any]:
    """A field in the notation of the rest of the service (`messages[0].role`), what is wrong, and the limit."""
    field = ""
    for part in item["loc"][1:]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    limits = {
        name: value
        for name, value in item.get("ctx", {}).items()
        if isinstance(value, int | float | str)
    }
    return {"field": field.lstrip("."), "message": item["msg"], "limits": limits}


async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """Answer what the framework itself refuses: an unknown route, a wrong method."""
    codes = {404: "unknown_route", 405: "method_not_allowed"}
    code = codes.get(error.status_code, "http_error")
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem_response(problem(error.status_code, code, detail), error.headers)


def unexpected() -> dict[str, Any]:
    """The problem of a mistake of ours, telling nothing of its inside; to be called where it was caught.

    The log line has the request's id, which the middleware has bound.
    """
    structlog.get_logger("kvrecall.gateway").exception("unexpected error")
    return problem(
        500, "internal_error", "an unexpected error; it was logged with the id of the request"
    )


Handler = Callable[[Request, Any], Awaitable[Response]]


def install_handlers(app: FastAPI) -> None:
    """Make every error that is foreseen a problem; the others are caught by the outermost middleware."""
    handlers: dict[type[Exception], Handler] = {
        errors.ServiceError: on_service_error,
        RequestValidationError: on_validation_error,
        HTTPException: on_http_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
