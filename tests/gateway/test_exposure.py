"""A gateway on an open address: catalog failures without addresses, and a warning at start."""

from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from gateway.settings import GatewaySettings
from kvrecall.app.run import warn_if_exposed
from kvrecall.app.settings import Settings
from kvrecall.domain.errors import CatalogError


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
    ("host", "behind_proxy", "warns"),
    [
        ("127.0.0.1", False, False),
        ("::1", False, False),
        ("0.0.0.0", False, True),
        ("0.0.0.0", True, False),
    ],
)
def test_a_start_off_loopback_without_a_proxy_is_warned_of(
    host: str, behind_proxy: bool, warns: bool, tmp_path: Path
) -> None:
    settings = Settings(
        host=host, data=tmp_path, gateway=GatewaySettings(behind_proxy=behind_proxy)
    )
    structlog.get_logger().bind()
    with capture_logs() as logs:
        warn_if_exposed(settings)
    assert [each["log_level"] for each in logs] == ["warning"] * warns
