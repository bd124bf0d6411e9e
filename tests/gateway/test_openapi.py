"""Fuzzing by the OpenAPI description: responses conform to it and are never a 5xx."""

from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/healthz"),
    ("GET", "/metrics"),
    ("GET", "/readyz"),
    ("GET", "/version"),
    ("DELETE", "/v1/conversations/{conversation}"),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}"),
    ("DELETE", "/v1/responses/{response}"),
    ("GET", "/v1/conversations/{conversation}"),
    ("GET", "/v1/conversations/{conversation}/items"),
    ("GET", "/v1/conversations/{conversation}/items/{item}"),
    ("GET", "/v1/methods"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/responses/{response}"),
    ("GET", "/v1/responses/{response}/input_items"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/sessions/{session}"),
    ("GET", "/v1/overview"),
    ("GET", "/v1/sessions/{session}/episodes"),
    ("GET", "/v1/sessions/{session}/family"),
    ("GET", "/v1/sessions/{session}/memory"),
    ("GET", "/v1/sessions/{session}/memory/map"),
    ("GET", "/v1/sessions/{session}/memory/tokens"),
    ("GET", "/v1/sessions/{session}/pauses"),
    ("GET", "/v1/sessions/{session}/repairs"),
    ("GET", "/v1/sessions/{session}/stream"),
    ("GET", "/v1/sessions/{session}/turns"),
    ("GET", "/v1/worker"),
    ("GET", "/v1/workers"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/conversations/{conversation}"),
    ("POST", "/v1/conversations/{conversation}/items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/responses/compact"),
    ("POST", "/v1/responses/input_tokens"),
    ("POST", "/v1/responses/{response}/cancel"),
    ("POST", "/v1/sessions"),
    ("POST", "/v1/sessions/{session}/events"),
    ("POST", "/v1/sessions/{session}/fork"),
    ("POST", "/v1/sessions/{session}/move"),
    ("POST", "/v1/sessions/{session}/turns"),
    ("DELETE", "/v1/sessions/{session}"),
]
# It ends when the client goes: tests/gateway/rest/test_watching.py reads it.
ENDLESS = ("GET", "/v1/stream")
QUERIED = ("repairs", "turns", "memory/map", "memory/tokens", "pauses")
WITH_INPUT = [
    (method, path)
    for method, path in OPERATIONS
    if method != "GET"
    or path == "/v1/sessions"
    or path in [f"/v1/sessions/{{session}}/{name}" for name in QUERIED]
]
# Valid budgets, methods, models and cursors depend on the worker and the session.
UNDESCRIBED = [positive_data_acceptance]
# What is not as described is refused; a list that is too long may be too large a body before.
REFUSALS = {
    "checks": {
        "negative_data_rejection": {"expected-statuses": [400, 404, 405, 409, 413, 415, 422, 429]}
    }
}
quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def description(live_url: str) -> Any:
    return schemathesis.openapi.from_url(
        f"{live_url}/openapi.json", config=SchemathesisConfig.from_dict(REFUSALS)
    )


def create_paused_session(live_url: str) -> str:
    """Create a session that waits for a tool's result."""
    session: str = httpx.post(f"{live_url}/v1/sessions", json={}).json()["id"]
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"messages": messages, "generate": False}
    assert httpx.post(f"{live_url}/v1/sessions/{session}/turns", json=body).status_code == 200
    return session


def test_the_description_lists_all_operations(description: Any) -> None:
    described = [result.ok() for result in description.get_all_operations()]
    assert sorted((operation.method.upper(), operation.path) for operation in described) == sorted(
        [*OPERATIONS, ENDLESS]
    )


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
    + [(*operation, GenerationMode.NEGATIVE) for operation in WITH_INPUT],
)
def test_every_response_conforms(
    description: Any, method: str, path: str, mode: GenerationMode
) -> None:
    @quick
    @given(description[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.call_and_validate(excluded_checks=UNDESCRIBED)

    check()


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize(
    "path", [path for method, path in OPERATIONS if method == "POST" and "{session}" in path]
)
def test_an_existing_session_survives_every_write(
    live_url: str, description: Any, path: str, mode: GenerationMode
) -> None:
    session = create_paused_session(live_url)

    @quick
    @given(description[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        case.path_parameters["session"] = session
        answer = case.call()
        assert answer.status_code < 500, answer.text

    check()
    assert httpx.get(f"{live_url}/v1/sessions/{session}").status_code == 200
