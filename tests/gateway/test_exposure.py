"""A gateway on an open address: catalog failures without addresses, and no start without keys."""

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvrecall.domain.errors import CatalogError
from kvrecall_server.app.access import open_keys, require_key
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from services.catalog.api_keys import KeyRecord


async def test_a_failed_catalog_is_logged_and_its_address_not_sent(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await api.session()
    reason = "the catalog's Redis failed: Error 111 connecting to 10.1.2.3:6379"

    async def fail(*_: object) -> None:
        raise CatalogError(reason)

    monkeypatch.setattr(api.catalog.sessions, "get", fail)
    with capture_logs() as logs:
        responses = [
            await api.http.get(f"/v1/sessions/{session}"),
            await api.turn(session),
            await api.turn(session, stream=True),
        ]
    for response in responses:
        assert (response.status_code, response.json()["code"]) == (503, "catalog_error")
        assert "10.1.2.3" not in response.text
    assert [each["reason"] for each in logs if each["event"] == "catalog failed"] == [reason] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "127.0.0.1"},
        {"host": "::1"},
        {"grpc": {"listen": "[::1]:0"}},
        {"host": "0.0.0.0", "api_key": "a-single-key"},
        {"grpc": {"listen": "0.0.0.0:0"}, "api_key": "a-single-key"},
        {"host": "0.0.0.0", "access": {"trusted_proxies": ["10.0.0.0/8"]}},
    ],
)
async def test_a_gateway_starts_where_senders_are_known(settings: Any, tmp_path: Path) -> None:
    await require_key(Settings(data=tmp_path, **settings))


@pytest.mark.parametrize("listen", [{"host": "0.0.0.0"}, {"grpc": {"listen": "0.0.0.0:0"}}])
async def test_a_gateway_that_others_reach_needs_a_key_to_start(
    listen: Any, tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path, **listen)
    for command in ("kvrecall keys create", "KVRECALL_API_KEY", "TRUSTED_PROXIES", "127.0.0.1"):
        with pytest.raises(CannotServe, match=command):
            await require_key(settings)
    assert not os.listdir(tmp_path)
    async with open_keys(settings) as keys:
        with pytest.raises(CannotServe):
            await require_key(settings)
        await keys.add(KeyRecord("k0000000", "", "", "", "", (), 1.0))
    await require_key(settings)
