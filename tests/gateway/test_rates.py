"""Rates and quotas over HTTP: headers that tell what is left, and refusals that tell what to do."""

import asyncio
from typing import Any

import pytest

from kvrecall.domain.limits import ServiceLimits
from services.access.settings import AccessSettings

ANN = {"X-Kvrecall-Tenant": "ann"}
BEN = {"X-Kvrecall-Tenant": "ben"}
MESSAGES = [{"role": "user", "content": "one two three four five"}]


async def complete(api: Any, headers: dict[str, str], **body: Any) -> Any:
    model = api.service.info.model
    return await api.http.post(
        "/v1/chat/completions",
        json={"model": model, "messages": MESSAGES, **body},
        headers=headers,
    )


class TestRequests:
    @pytest.fixture
    def access_settings(self) -> AccessSettings:
        return AccessSettings(tenant_requests_per_minute=2)

    async def test_headers_count_down_and_a_refusal_tells_when_to_come_back(self, api: Any) -> None:
        for remaining in ("1", "0"):
            answer = await api.http.get("/v1/models", headers=ANN)
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == remaining
            assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
            assert "x-ratelimit-limit-tokens" not in answer.headers
        for path in ("/v1/models", "/v1/sessions"):
            refused = await api.http.get(path, headers=ANN)
            assert refused.status_code == 429
            assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
            assert 0 < int(refused.headers["retry-after"]) <= 60
            assert "x-should-retry" not in refused.headers
            error = refused.json().get("error", refused.json())
            assert error["code"] == "rate_limit_exceeded"
        assert refused.headers["content-type"] == "application/problem+json"
        assert (await api.http.get("/v1/models", headers=BEN)).status_code == 200
        assert (await api.http.get("/healthz", headers=ANN)).status_code == 200


class TestTokens:
    @pytest.fixture
    def access_settings(self) -> AccessSettings:
        return AccessSettings(tenant_tokens_per_minute=5)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_turns_tokens_count_for_whoever_sent_it(self, api: Any, stream: bool) -> None:
        first = await complete(api, ANN, stream=stream)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-tokens"] == "5"
        await asyncio.sleep(0)
        refused = await complete(api, ANN, stream=stream)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in refused.headers
        session = first.headers["kvrecall-session"]
        own = await api.http.post(
            f"/v1/sessions/{session}/turns", json={"messages": MESSAGES}, headers=ANN
        )
        assert own.status_code == 429
        read = await api.http.get(f"/v1/sessions/{session}", headers=ANN)
        assert (read.status_code, read.headers["x-ratelimit-remaining-tokens"]) == (200, "0")
        assert (await complete(api, BEN)).status_code == 200
        deleted = await api.http.delete(f"/v1/sessions/{session}", headers=ANN)
        assert deleted.status_code == 204


class TestQuotas:
    @pytest.fixture
    def service_settings(self) -> ServiceLimits:
        return ServiceLimits(queue_seconds=5, tenant_bytes=64 * 7)

    async def test_a_tenant_over_its_bytes_is_told_that_a_retry_is_no_use(self, api: Any) -> None:
        created = await api.http.post("/v1/sessions", json={"budget": 64}, headers=ANN)
        path = f"/v1/sessions/{created.json()['id']}/turns"
        turn = await api.http.post(path, json={"messages": MESSAGES}, headers=ANN)
        assert turn.status_code == 200  # it leaves no room
        refused = await complete(api, ANN)
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
        assert "the tenant would have" in error["message"]
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert (await complete(api, BEN)).status_code == 200
