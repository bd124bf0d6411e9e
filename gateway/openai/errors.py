"""Errors in OpenAI's form, for the routes of OpenAI's API."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from gateway.http.errors import VendorFormat, describe_errors, find_overflow, get_vendor_status
from kvrecall.domain.codes import ErrorCode

# The routes of this API; the session API's errors are problem details.
_PATHS = (
    "/v1/chat/completions/",
    "/v1/completions/",
    "/tokenize/",
    "/detokenize/",
    "/v1/models/",
    "/v1/responses/",
    "/v1/conversations/",
)

_CODES: Mapping[str, str] = {
    ErrorCode.INVALID_REQUEST: "invalid_value",
    ErrorCode.UNKNOWN_MODEL: "model_not_found",
    ErrorCode.UNKNOWN_RESPONSE: "response_not_found",
    ErrorCode.UNKNOWN_CONVERSATION: "conversation_not_found",
    ErrorCode.UNKNOWN_ITEM: "item_not_found",
    ErrorCode.TOOL_RESULT_WITHOUT_CALL: "tool_call_unknown",
    ErrorCode.CALLS_OUTSTANDING: "tool_result_missing",
    ErrorCode.RESULT_CONFLICT: "tool_result_conflict",
    ErrorCode.TURN_TOO_LONG: "array_above_max_length",
    ErrorCode.BODY_TOO_LARGE: "request_too_large",
    ErrorCode.QUOTA_EXCEEDED: "insufficient_quota",
}
# Errors of the messages as a whole, where the problem names no field.
_OF_MESSAGES = frozenset(
    {ErrorCode.CALLS_OUTSTANDING, ErrorCode.RESULT_CONFLICT, ErrorCode.TURN_TOO_LONG}
)
_UNANSWERED = (
    "An assistant message with 'tool_calls' must be followed by tool messages that respond to each "
    "'tool_call_id'. Without a response: {calls}"
)


OVERFLOW_CODE = "context_length_exceeded"
# Clients find the numbers in these words, and compact the conversation.
_OVERFLOW = (
    "This model's maximum context length is {limit} tokens. However, your messages resulted in "
    "{tokens} tokens. Please reduce the length of the messages."
)


class OpenAIErrorObject(BaseModel):
    """OpenAI's error; clients expect all four members."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(BaseModel):
    """Body of every response with an error."""

    error: OpenAIErrorObject


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the responses with an error of a route for OpenAPI."""
    return describe_errors(OpenAIError, "application/json", *statuses)


def to_openai_error(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a problem to OpenAI's error object, with all four members.

    `param` names the field where one is at fault, `code` is OpenAI's where it has one.
    """
    code = problem["code"]
    message = problem["detail"]
    if code == ErrorCode.CALLS_OUTSTANDING:
        message = _UNANSWERED.format(calls=", ".join(problem["calls"]))
    own = problem.get("openai_code") or _CODES.get(code, str(code))
    overflow = find_overflow(problem)
    if overflow is not None:
        message, own = _OVERFLOW.format(tokens=overflow.tokens, limit=overflow.limit), OVERFLOW_CODE
    param = problem.get("field") or ("messages" if code in _OF_MESSAGES else None)
    error = OpenAIErrorObject(
        message=message,
        type=_get_type(code, get_vendor_status(problem)),
        param=param,
        code=own,
    )
    return OpenAIError(error=error).model_dump()


def _get_type(code: str, status: int) -> str:
    if code == ErrorCode.QUOTA_EXCEEDED:
        return "insufficient_quota"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    if status == 409:
        return "conflict_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def _build_headers(seconds: float) -> list[tuple[bytes, bytes]]:
    """Build the headers that every answer of OpenAI's API has; `seconds`: until its first byte."""
    return [
        (b"openai-version", b"2020-10-01"),
        (b"openai-processing-ms", str(round(1000 * seconds)).encode()),
    ]


OPENAI_FORMAT = VendorFormat("openai", _PATHS, OpenAIError, to_openai_error, _build_headers)
"""The form of answers of OpenAI's API."""
