"""Tenant header: the sessions of other tenants are unknown to a request."""

from typing import Any

import pytest

from kvrecall.domain.limits import ServiceLimits

ANN = {"X-Kvrecall-Tenant": "ann"}
BEN = {"X-Kvrecall-Tenant": "ben"}
USER = {"messages": [{"role": "user", "content": "hello"}]}
CALLS = [
    ("GET", "", None),
    ("GET", "/memory", None),
    ("GET", "/repairs", None),
    ("GET", "/episodes", None),
    ("POST", "/turns", USER),
    ("POST", "/turns", {**USER, "stream": True}),
    ("POST", "/fork", {}),
    ("POST", "/events", {"type": "tool_call.started", "call_id": "c1"}),
    ("DELETE", "", None),
]


async def create_session(api: Any, headers: dict[str, str]) -> str:
    answer = await api.http.post("/v1/sessions", json={"budget": 64}, headers=headers)
    assert answer.status_code == 201, answer.text
    session: str = answer.json()["id"]
    return session


@pytest.mark.parametrize(("method", "rest", "body"), CALLS)
@pytest.mark.parametrize("headers", [{}, BEN])
async def test_another_tenants_session_is_unknown(
    api: Any, method: Any, rest: Any, body: Any, headers: Any
) -> None:
    session = await create_session(api, ANN)
    answer = await api.http.request(
        method, f"/v1/sessions/{session}{rest}", json=body, headers=headers
    )
    unknown = await api.http.request(
        method, f"/v1/sessions/s_none{rest}", json=body, headers=headers
    )
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session")
    assert answer.text == unknown.text.replace("s_none", session)
    assert (await api.http.get(f"/v1/sessions/{session}", headers=ANN)).json()["turns"] == 0


async def test_a_tenant_has_full_access_to_its_sessions(api: Any) -> None:
    session = await create_session(api, ANN)
    turn = await api.http.post(f"/v1/sessions/{session}/turns", json=USER, headers=ANN)
    assert turn.json()["turn"] == 1
    child = await api.http.post(f"/v1/sessions/{session}/fork", json={}, headers=ANN)
    assert child.status_code == 201
    listed = (await api.http.get("/v1/sessions", headers=ANN)).json()["sessions"]
    assert [found["id"] for found in listed] == [child.json()["id"], session]
    for headers in ({}, BEN):
        assert (await api.http.get("/v1/sessions", headers=headers)).json()["sessions"] == []
    assert (await api.http.delete(f"/v1/sessions/{session}", headers=ANN)).status_code == 204


async def test_two_tenants_may_use_the_same_key(api: Any) -> None:
    made = [
        await api.http.post(
            "/v1/sessions", json={"budget": 64}, headers={**headers, "Idempotency-Key": "k"}
        )
        for headers in (ANN, BEN, ANN, {})
    ]
    first, second, again, default = (answer.json()["id"] for answer in made)
    assert first == again
    assert len({first, second, default}) == 3


async def test_a_repeated_delete_gets_the_same_response(api: Any) -> None:
    session = await create_session(api, ANN)
    headers = {**ANN, "Idempotency-Key": "k"}
    for _ in range(2):
        assert (
            await api.http.delete(f"/v1/sessions/{session}", headers=headers)
        ).status_code == 204


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "ä".encode("latin-1")])
async def test_a_tenants_name_is_plain(api: Any, name: Any) -> None:
    answer = await api.http.get("/v1/sessions", headers={"X-Kvrecall-Tenant": name})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


class TestQuota:
    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, tenant_tokens=7)

    async def test_a_tenant_over_its_quota_gets_the_limit_and_is_counted(self, api: Any) -> None:
        session = await create_session(api, ANN)
        long = {"messages": [{"role": "user", "content": "1 2 3 4 5"}]}
        assert (
            await api.http.post(f"/v1/sessions/{session}/turns", json=long, headers=ANN)
        ).status_code == 200
        for path, body in (
            (f"/v1/sessions/{session}/turns", USER),
            (f"/v1/sessions/{session}/fork", {}),
            ("/v1/sessions", {"budget": 64}),
        ):
            answer = await api.http.post(path, json=body, headers=ANN)
            assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
            assert answer.json()["limit"] == 7
            assert "Retry-After" not in answer.headers
        assert await create_session(api, BEN)
        assert "kvrecall_quota_refusals_total 3.0" in (await api.http.get("/metrics")).text
