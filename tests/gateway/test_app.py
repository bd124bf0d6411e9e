"""Application: liveness, readiness and request ids."""

import asyncio
from importlib.metadata import version
from typing import Any

import pytest

from kvrecall.domain.errors import CatalogError
from services import status


async def test_health_and_readiness(api: Any) -> None:
    assert (await api.http.get("/healthz")).json() == {"status": "alive"}
    assert (await api.http.get("/readyz")).json() == {"status": "ready"}
    assert (await api.http.get("/readyz", params={"workers": True})).json() == {"status": "ready"}
    assert (await api.http.get("/health")).json() == {"status": "ok"}
    await api.service.stop()
    assert (await api.http.get("/health")).status_code == 503
    unready = await api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "shutting_down")
    assert (await api.http.get("/healthz")).status_code == 200
    assert (await api.http.post("/v1/sessions", json={})).status_code == 503


async def test_clients_at_the_root_are_told_where_to_begin(api: Any) -> None:
    for accepted in ("*/*", "text/html"):
        found = (await api.http.get("/", headers={"Accept": accepted})).json()
        assert (found["name"], found["version"]) == ("kvrecall", version("kvrecall"))
        assert found["links"].keys() == {"docs", "openapi", "models"}
    for path in found["links"].values():
        assert (await api.http.get(path)).status_code == 200, path


async def test_a_service_whose_catalog_fails_is_not_ready(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: str) -> int:
        raise CatalogError("the disk is gone")

    monkeypatch.setattr(api.catalog.sessions, "count", fail)
    unready = await api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "catalog_error")
    monkeypatch.setattr(status, "_CATALOG_SECONDS", 0.05)
    monkeypatch.setattr(api.catalog.sessions, "count", hang)
    unready = await api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "catalog_error")


async def hang(_: str) -> int:
    await asyncio.Event().wait()
    return 0


@pytest.mark.parametrize("given", ["request-1", None, "no good\x7f"])
async def test_every_answer_has_a_request_id(api: Any, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    for path in ("/healthz", "/v1/sessions/unknown", "/nowhere"):
        id = (await api.http.get(path, headers=headers)).headers["x-request-id"]
        assert id == given if given == "request-1" else len(id) == 16
