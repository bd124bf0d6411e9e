"""A gateway whose catalog's disk is full: it says so, refuses what would store more, and deletes."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from faults.rig.disks import Tmpfs, new_disk
from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from gateway.metrics import status
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.testing import StubWorker
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService

MIB = 1 << 20
TURN = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 2}
LARGE = {"items": [{"type": "message", "role": "user", "content": "x" * 3_000_000}]}


@pytest.fixture
async def http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway over a catalog on a disk of 64 MiB, of which 8 are left to deletions."""
    monkeypatch.setattr(status, "_COUNT_SECONDS", 0.0)
    disk = new_disk(tmp_path / "disk", 64 * MIB)
    if not isinstance(disk, Tmpfs):
        disk.close()
        pytest.skip("no tmpfs can be mounted here")
    try:
        catalog = await SqliteCatalog.open(tmp_path / "disk" / "catalog.sqlite3", 8 * MIB)
        service = SessionService(StubWorker(), catalog, ServiceLimits(queue_seconds=5))
        app = create_app(service, GatewaySettings())
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://kvrecall") as client:
                yield client
    finally:
        disk.close()


async def test_a_tenant_that_fills_the_disk_keeps_nobody_from_deleting(
    http: httpx.AsyncClient,
) -> None:
    mallory = {"X-Kvrecall-Tenant": "mallory"}
    session = (await http.post("/v1/sessions", json={"budget": 64})).json()["id"]
    turns = f"/v1/sessions/{session}/turns"
    assert (await http.post(turns, json=TURN)).status_code == 200
    assert "kvrecall_catalog_full 0.0" in (await http.get("/metrics")).text
    created = []
    while (made := await http.post("/v1/conversations", json=LARGE, headers=mallory)).is_success:
        created.append(made.json()["id"])
        assert len(created) < 20
    assert made.status_code == 507
    assert made.json()["error"]["code"] == "storage_full"
    assert "deletions go on" in made.json()["error"]["message"]
    refused = await http.post(turns, json=TURN)
    assert (refused.status_code, refused.json()["code"]) == (507, "storage_full")
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "catalog": "full"})
    assert "kvrecall_catalog_full 1.0" in (await http.get("/metrics")).text
    for id in created:
        deleted = await http.delete(f"/v1/conversations/{id}", headers=mallory)
        assert deleted.status_code == 200
    assert (await http.get("/readyz")).json() == {"status": "ready"}
    assert (await http.post(turns, json=TURN)).status_code == 200
    assert (await http.delete(f"/v1/sessions/{session}")).status_code == 204
