"""Requests of web pages: none is let in unless its origin is set, and errors are readable too."""

from typing import Any

import pytest

from gateway.http.settings import GatewaySettings
from services.access.authenticator import AccessPolicy

APP = "https://app.example"


@pytest.fixture
def access_policy() -> AccessPolicy:
    return AccessPolicy(open=False)


async def ask(api: Any, origin: str) -> Any:
    return await api.http.options(
        "/v1/chat/completions",
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, x-stainless-os, kvrecall-budget",
        },
    )


async def test_no_origin_is_let_in_by_default(api: Any) -> None:
    assert (await ask(api, APP)).status_code == 401
    answer = await api.http.get("/healthz", headers={"Origin": APP})
    assert not [name for name in answer.headers if name.startswith("access-control")]


class TestOrigins:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(cors_origins=(APP,))

    async def test_a_set_origin_may_send_its_headers_before_it_has_a_key(self, api: Any) -> None:
        allowed = await ask(api, APP)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == APP
        names = allowed.headers["access-control-allow-headers"]
        assert {"authorization", "x-stainless-os", "kvrecall-budget"} <= set(names.split(", "))
        other = await ask(api, "https://other.example")
        assert "access-control-allow-origin" not in other.headers

    async def test_a_refusal_is_readable_with_the_headers_that_matter(self, api: Any) -> None:
        answer = await api.http.get("/v1/models", headers={"Origin": APP})
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == APP
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "kvrecall-session", "x-ratelimit-reset-tokens"} <= set(exposed)
