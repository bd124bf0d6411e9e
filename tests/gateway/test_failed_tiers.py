"""A failed storage tier is shown in the readiness of the service."""

from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb


async def test_a_failed_tier_is_shown_and_the_service_stays_ready(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.http.get("/readyz", params={"workers": True})).json() == {"status": "ready"}
    (name,) = api.worker.names or ["stub"]

    async def stats() -> dict[str, pb.WorkerStats]:
        tiers = {
            "ram": pb.TierStats(),
            "nvme": pb.TierStats(failure="a sync failed (Input/output error)"),
        }
        return {name: pb.WorkerStats(tiers=tiers)}

    monkeypatch.setattr(api.worker, "stats", stats)
    ready = await api.http.get("/readyz", params={"workers": True})
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "failed_tiers": f"{name}/nvme"}
