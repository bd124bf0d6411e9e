"""Requests and responses of both clients: headers, problems, retries."""

import os
import secrets
from dataclasses import dataclass, replace
from typing import TypeVar

import httpx

from kvrecall.client._calls import Call
from kvrecall.client.exceptions import (
    ConnectionFailed,
    InvalidResponse,
    KvrecallError,
    Overloaded,
    ServiceProblem,
    build_problem,
)

Result = TypeVar("Result")
CONNECT_SECONDS = 10.0
KEY_VARIABLE = "KVRECALL_API_KEY"
# Backoff of retries: doubles from the first delay up to the longest.
FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 8.0


def build_timeout(seconds: float) -> httpx.Timeout:
    """Build the timeout of a client: `seconds` without any data, 10 s to connect."""
    return httpx.Timeout(seconds, connect=CONNECT_SECONDS)


def build_headers(tenant: str, api_key: str | None) -> dict[str, str]:
    """Build the headers of every request; a key that is None is the environment's, if it has one."""
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    return {
        **({"X-Kvrecall-Tenant": tenant} if tenant else {}),
        **({"Authorization": f"Bearer {key}"} if key else {}),
    }


def build_request(http: httpx.Client | httpx.AsyncClient, call: Call[Result]) -> httpx.Request:
    """Build the HTTP request of a call."""
    headers = {} if call.key is None else {"Idempotency-Key": call.key}
    return http.build_request(
        call.method, call.path, json=call.body, params=call.params, headers=headers
    )


def parse_response(call: Call[Result], response: httpx.Response) -> Result:
    """Parse a response that was read. Raises ServiceProblem and InvalidResponse."""
    if response.is_error:
        raise to_problem(response)
    try:
        return call.parse(response.json() if response.content else None)
    except (ValueError, LookupError, TypeError) as error:
        detail = f"the response of {call.method} {call.path} cannot be parsed: {error!r}"
        raise InvalidResponse(detail, response.status_code) from error


def to_problem(response: httpx.Response) -> ServiceProblem:
    """Convert an error response that was read; one without problem details has its reason only."""
    try:
        members = response.json()
    except ValueError:
        members = {}
    retry_after = response.headers.get("Retry-After", "")
    return build_problem(
        response.status_code,
        members if isinstance(members, dict) else {},
        response.reason_phrase,
        float(retry_after) if retry_after.isdecimal() else None,
    )


def to_connection_failed(error: httpx.TransportError) -> ConnectionFailed:
    """Convert an error of the connection."""
    return ConnectionFailed(str(error) or type(error).__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """Up to `retries` more attempts after a failed connection or a response that asks for one."""

    retries: int = 0

    def prepare(self, call: Call[Result]) -> Call[Result]:
        """Give a write an idempotency key, so that a repeated request is not run twice."""
        if not self.retries or call.method == "GET" or call.key is not None:
            return call
        return replace(call, key=secrets.token_hex(16))

    def get_delay(self, call: Call[Result], error: KvrecallError, attempt: int) -> float | None:
        """Return the seconds until the next attempt; None to give up. `attempt` is from 0."""
        if attempt >= self.retries or not call.repeatable:
            return None
        if isinstance(error, ServiceProblem) and error.retry_after_seconds is not None:
            return error.retry_after_seconds
        if not isinstance(error, ConnectionFailed | Overloaded):
            return None
        return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * (1 << attempt))
