"""A header says whose a request is: to each tenant, others' sessions are not there."""

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


async def session_of(front, headers: dict[str, str]) -> str:
    answer = await front.http.post("/v1/sessions", json={"budget": 64}, headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


@pytest.mark.parametrize(("method", "rest", "body"), CALLS)
@pytest.mark.parametrize("headers", [{}, BEN])
async def test_another_tenants_session_is_answered_as_an_unknown_one(
    front, method, rest, body, headers
) -> None:
    session = await session_of(front, ANN)
    answer = await front.http.request(
        method, f"/v1/sessions/{session}{rest}", json=body, headers=headers
    )
    unknown = await front.http.request(
        method, f"/v1/sessions/s_none{rest}", json=body, headers=headers
    )
    assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session")
    assert answer.text == unknown.text.replace("s_none", session)
    assert (await front.http.get(f"/v1/sessions/{session}", headers=ANN)).json()["turns"] == 0


async def test_a_tenant_has_the_whole_of_its_own_session(front) -> None:
    session = await session_of(front, ANN)
    said = await front.http.post(f"/v1/sessions/{session}/turns", json=USER, headers=ANN)
    assert said.json()["turn"] == 1
    child = await front.http.post(f"/v1/sessions/{session}/fork", json={}, headers=ANN)
    assert child.status_code == 201
    listed = (await front.http.get("/v1/sessions", headers=ANN)).json()["sessions"]
    assert [found["id"] for found in listed] == [child.json()["id"], session]
    for headers in ({}, BEN):
        assert (await front.http.get("/v1/sessions", headers=headers)).json()["sessions"] == []
    assert (await front.http.delete(f"/v1/sessions/{session}", headers=ANN)).status_code == 204


async def test_two_tenants_may_use_the_same_key(front) -> None:
    made = [
        await front.http.post(
            "/v1/sessions", json={"budget": 64}, headers={**headers, "Idempotency-Key": "k"}
        )
        for headers in (ANN, BEN, ANN, {})
    ]
    first, second, again, nobodys = (answer.json()["id"] for answer in made)
    assert first == again
    assert len({first, second, nobodys}) == 3


async def test_a_repeated_delete_is_answered_as_the_first(front) -> None:
    session = await session_of(front, ANN)
    headers = {**ANN, "Idempotency-Key": "k"}
    for _ in range(2):
        assert (
            await front.http.delete(f"/v1/sessions/{session}", headers=headers)
        ).status_code == 204


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 65, "ä".encode("latin-1")])
async def test_a_tenants_name_is_plain(front, name) -> None:
    answer = await front.http.get("/v1/sessions", headers={"X-Kvrecall-Tenant": name})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


class TestQuota:
    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, tenant_tokens=5)

    async def test_a_tenant_over_its_quota_is_told_the_limit_and_counted(self, front) -> None:
        session = await session_of(front, ANN)
        long = {"messages": [{"role": "user", "content": "1 2 3 4 5"}]}
        assert (
            await front.http.post(f"/v1/sessions/{session}/turns", json=long, headers=ANN)
        ).status_code == 200
        for path, body in (
            (f"/v1/sessions/{session}/turns", USER),
            (f"/v1/sessions/{session}/fork", {}),
            ("/v1/sessions", {"budget": 64}),
        ):
            answer = await front.http.post(path, json=body, headers=ANN)
            assert (answer.status_code, answer.json()["code"]) == (429, "quota_exceeded")
            assert answer.json()["limit"] == 5
            assert "Retry-After" not in answer.headers
        assert await session_of(front, BEN)
        assert "kvrecall_quota_refusals_total 3.0" in (await front.http.get("/metrics")).text
