"""Requests for what was encrypted under a deleted data key: a clear 404, a deletion, and a new beginning."""

from pathlib import Path

import httpx

from gateway.app import create_app
from gateway.http.settings import GatewaySettings
from kvrecall.domain.limits import ServiceLimits
from kvrecall_server.testing import StubWorker
from services.catalog.encryption.keyring import make_line, parse_keyring
from services.catalog.sqlite.catalog import SqliteCatalog
from services.service import SessionService


async def test_every_read_says_that_nobody_can_read_it_and_the_tenant_goes_on(
    tmp_path: Path,
) -> None:
    keyring = parse_keyring(make_line("operator"))
    catalog = await SqliteCatalog.open(tmp_path / "catalog.db", keyring=keyring)
    service = SessionService(StubWorker(), catalog, ServiceLimits(drain_seconds=5))
    await service.start()
    transport = httpx.ASGITransport(create_app(service, GatewaySettings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        made = await client.post("/v1/sessions", json={"budget": 64})
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        session = made.json()["id"]
        await catalog.data_keys.delete("")
        catalog._database.cache.drop(None)
        turn = {"messages": [{"role": "user", "content": "hello"}], "stream": False}
        for answer in (
            await client.get(f"/v1/sessions/{session}"),
            await client.get(f"/v1/sessions/{session}/turns"),
            await client.post(f"/v1/sessions/{session}/turns", json=turn),
            await client.get(f"/v1/conversations/{conversation}"),
        ):
            assert answer.status_code == 404, answer.text
            assert "can no longer be decrypted" in answer.text
        problem = (await client.get(f"/v1/sessions/{session}")).json()
        assert problem["code"] == "data_key_deleted"
        assert (await client.get("/v1/sessions")).json()["sessions"] == []
        assert (await client.delete(f"/v1/sessions/{session}")).status_code == 204
        assert (await client.delete(f"/v1/conversations/{conversation}")).status_code == 200
        again = await client.post("/v1/sessions", json={"budget": 64})
        assert (await client.get(f"/v1/sessions/{again.json()['id']}")).status_code == 200
    await service.stop()
