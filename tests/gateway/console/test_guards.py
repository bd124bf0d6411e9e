"""Requests that a browser was tricked into: by a name that resolves here, or by another site's page."""

from typing import Any

import pytest

from gateway.console.guards import get_name
from gateway.http.settings import GatewaySettings

BODY = {"budget": 64, "seed": 1}


def settings_on(host: str, **settings: Any) -> GatewaySettings:
    return GatewaySettings(**settings).for_listener(host)


async def read(api: Any, host: str) -> Any:
    return await api.http.get("/v1/sessions", headers={"Host": host})


async def write(api: Any, host: str, origin: str | None) -> Any:
    headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
    return await api.http.post("/v1/sessions", json=BODY, headers=headers)


class TestOnLoopback:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return settings_on("127.0.0.1", hosts=("kvrecall.internal",))

    @pytest.mark.parametrize(
        "host",
        [
            "localhost",
            "LOCALHOST:8420",
            "127.0.0.1:8420",
            "[::1]:8420",
            "[::1]",
            "kvrecall.internal:80",
        ],
    )
    async def test_its_own_names_are_answered(self, api: Any, host: str) -> None:
        assert (await read(api, host)).status_code == 200

    @pytest.mark.parametrize(
        "host",
        [
            "attacker.example",
            "attacker.example:8420",
            "localhost.attacker.example",
            "127.0.0.1.attacker.example:8420",
            "[::2]:8420",
            "192.168.0.1",
        ],
    )
    async def test_any_other_name_is_refused_with_what_to_do(self, api: Any, host: str) -> None:
        for path in ("/v1/sessions", "/console/", "/metrics", "/healthz"):
            answer = await api.http.get(path, headers={"Host": host})
            assert (answer.status_code, answer.json()["code"]) == (421, "wrong_host")
            assert "KVRECALL_GATEWAY__HOSTS" in answer.json()["detail"]
            assert answer.headers["x-request-id"]


class TestElsewhere:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return settings_on("0.0.0.0")

    async def test_any_name_is_answered_unless_some_are_set(self, api: Any) -> None:
        assert (await read(api, "kvrecall.example")).status_code == 200

    def test_set_names_are_the_only_ones(self) -> None:
        assert settings_on("0.0.0.0", hosts=("a.example",)).hosts == ("a.example",)


class TestAnyName:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return settings_on("127.0.0.1", hosts=("*",))

    async def test_a_star_is_any_name(self, api: Any) -> None:
        assert (await read(api, "anything.example")).status_code == 200


class TestOrigins:
    @pytest.fixture
    def gateway_settings(self) -> GatewaySettings:
        return GatewaySettings(cors_origins=("https://app.example",))

    @pytest.mark.parametrize(
        ("host", "origin"),
        [
            ("kvrecall:8420", None),
            ("kvrecall:8420", "http://kvrecall:8420"),
            ("kvrecall", "http://kvrecall:80"),
            ("kvrecall:443", "https://kvrecall"),
            ("KVRECALL", "http://kvrecall"),
            ("kvrecall:8420", "https://app.example"),
        ],
    )
    async def test_a_write_of_its_own_page_or_of_a_set_origin_is_taken(
        self, api: Any, host: str, origin: str | None
    ) -> None:
        assert (await write(api, host, origin)).status_code == 201

    @pytest.mark.parametrize(
        "origin",
        [
            "https://attacker.example",
            "http://kvrecall:8421",
            "http://kvrecall.attacker.example:8420",
            "null",
            "",
            "http://[",
        ],
    )
    async def test_a_write_of_any_other_page_changes_nothing(self, api: Any, origin: str) -> None:
        answer = await write(api, "kvrecall:8420", origin)
        assert (answer.status_code, answer.json()["code"]) == (403, "wrong_origin")
        assert (await api.http.get("/v1/sessions")).json()["sessions"] == []

    async def test_a_form_of_another_site_is_refused(self, api: Any) -> None:
        form = {"Origin": "https://attacker.example", "Content-Type": "text/plain"}
        answer = await api.http.post("/v1/sessions", content=b'{"budget": 64}', headers=form)
        assert answer.status_code == 403

    async def test_a_read_is_left_to_the_browser_which_shows_it_to_nobody(self, api: Any) -> None:
        answer = await api.http.get("/v1/sessions", headers={"Origin": "https://attacker.example"})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a.example:1", "a.example"),
        ("a.example", "a.example"),
        ("[::1]:1", "::1"),
        ("[::1]", "::1"),
    ],
)
def test_a_name_is_read_without_port_and_brackets(host: str, name: str) -> None:
    assert get_name(host) == name
