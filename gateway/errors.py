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
from kvrecall.domain.codes import ErrorCode

PROBLEM_JSON = "application/problem+json"

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
    code: ErrorCode,
    detail: str,
    details: Mapping[str, Any] | None = None,
    status: int | None = None,
) -> dict[str, Any]:
    """Return the members of a problem; `status` is that of the code unless it is given."""
    status = code.http_status if status is None else status
    return {
        "type": f"urn:kvrecall:problem:{code.replace('_', '-')}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": str(code),
        **(details or {}),
    }


def problem_of(error: errors.ServiceError) -> dict[str, Any]:
    """The problem of a domain error."""
    return problem(error.code, error.message, error.details)


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
    members = problem(ErrorCode.INVALID_REQUEST, detail, {"field": first["field"], "errors": found})
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
    codes = {404: ErrorCode.UNKNOWN_ROUTE, 405: ErrorCode.METHOD_NOT_ALLOWED}
    code = codes.get(error.status_code, ErrorCode.HTTP_ERROR)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return problem_response(problem(code, detail, status=error.status_code), error.headers)


def unexpected() -> dict[str, Any]:
    """The problem of a mistake of ours, telling nothing of its inside; to be called where it was caught.

    The log line has the request's id, which the middleware has bound.
    """
    structlog.get_logger("kvrecall.gateway").exception("unexpected error")
    return problem(
        ErrorCode.INTERNAL_ERROR, "an unexpected error; it was logged with the id of the request"
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
