"""Errors in Anthropic's form, for the routes of Anthropic's API."""

from collections.abc import Mapping
from typing import Any

import structlog
from pydantic import BaseModel

from gateway.http.errors import VendorFormat, describe_errors, find_overflow, get_vendor_status
from kvrecall.domain.codes import ErrorCode

_PATH = "/v1/messages/"
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_DETAILS: Mapping[str, Mapping[str, str]] = {
    ErrorCode.UNKNOWN_MESSAGE: {"error_code": "thread_not_found"},
}
_UNANSWERED = "each tool_use block needs a tool_result block in the next message; without: {calls}"


class AnthropicErrorObject(BaseModel):
    """Anthropic's error; `details.error_code` names the cause where clients act on it."""

    type: str
    message: str
    details: Mapping[str, Any] | None = None


class AnthropicError(BaseModel):
    """Body of every response with an error."""

    type: str = "error"
    error: AnthropicErrorObject
    request_id: str | None = None


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the responses with an error of a route for OpenAPI."""
    return describe_errors(AnthropicError, "application/json", *statuses)


def to_anthropic_error(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a problem to Anthropic's error object; its message begins with the field at fault.

    Its statuses are those of OpenAI's API (`get_vendor_status`): the same clients repeat the same ones.
    """
    status = get_vendor_status(problem)
    message = problem["detail"]
    if problem["code"] == ErrorCode.CALLS_OUTSTANDING:
        message = _UNANSWERED.format(calls=", ".join(problem["calls"]))
    overflow = find_overflow(problem)
    if overflow is not None:
        message = f"prompt is too long: {overflow.tokens} tokens > {overflow.limit} maximum"
    field = None if overflow is not None else problem.get("field")
    if field and not message.startswith(f"{field}:"):
        message = f"{field}: {message}"
    other = "api_error" if status >= 500 else "invalid_request_error"
    error = AnthropicErrorObject(
        type=_TYPES.get(status, other),
        message=message,
        details=problem.get("anthropic_details") or _DETAILS.get(problem["code"]),
    )
    request_id = structlog.contextvars.get_contextvars().get("request_id")
    return AnthropicError(error=error, request_id=request_id).model_dump(exclude_none=True)


ANTHROPIC_FORMAT = VendorFormat("anthropic", (_PATH,), AnthropicError, to_anthropic_error)
"""The form of answers of Anthropic's API."""
