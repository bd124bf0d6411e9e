"""Whatever fits or does not fit the description, the service answers as described and never with a 5xx."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

described = schemathesis.pytest.from_fixture("description")


@pytest.fixture(scope="module")
def description(live_url: str):
    return schemathesis.openapi.from_url(f"{live_url}/openapi.json")


@pytest.fixture(scope="module")
def session(live_url: str) -> str:
    return httpx.post(f"{live_url}/v1/sessions", json={}).json()["id"]


@described.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_described(case) -> None:
    case.call_and_validate()


@described.include(path_regex="session}").exclude(method="DELETE").parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_an_existing_session_survives_every_request(case, session: str) -> None:
    case.path_parameters["session"] = session
    answer = case.call()
    assert answer.status_code < 500, answer.text
