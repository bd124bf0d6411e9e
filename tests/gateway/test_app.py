"""Application: liveness, readiness and request ids."""

from typing import Any

import pytest


async def test_health_and_readiness(api: Any) -> None:
    assert (await api.http.get("/healthz")).json() == {"status": "alive"}
    assert (await api.http.get("/readyz")).json() == {"status": "ready"}
    await api.service.stop()
    unready = await api.http.get("/readyz")
    assert (unready.status_code, unready.json()["code"]) == (503, "shutting_down")
    assert (await api.http.get("/healthz")).status_code == 200
    assert (await api.http.post("/v1/sessions", json={})).status_code == 503


@pytest.mark.parametrize("given", ["request-1", None, "no good\x7f"])
async def test_every_answer_has_a_request_id(api: Any, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-ID": given}
    for path in ("/healthz", "/v1/sessions/unknown", "/nowhere"):
        id = (await api.http.get(path, headers=headers)).headers["x-request-id"]
        assert id == given if given == "request-1" else len(id) == 16
