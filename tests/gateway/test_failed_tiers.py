"""A failed storage tier is shown: in the metrics, and in the readiness of the service."""

from typing import Any

import pytest

from kvrecall.protocol.v1 import worker_pb2 as pb
from tests.gateway.test_metrics import scrape


async def test_a_failed_tier_is_shown_and_the_service_stays_ready(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.http.get("/readyz")).json() == {"status": "ready"}
    (name,) = {key[2] for key in await scrape(api) if key[0] == "kvrecall_tier_failed"}

    async def stats() -> dict[str, pb.WorkerStats]:
        tiers = {
            "ram": pb.TierStats(),
            "nvme": pb.TierStats(failure="a sync failed (Input/output error)"),
        }
        return {name: pb.WorkerStats(tiers=tiers)}

    monkeypatch.setattr(api.worker, "stats", stats)
    ready = await api.http.get("/readyz")
    assert ready.status_code == 200
    assert ready.json() == {"status": "ready", "failed_tiers": f"{name}/nvme"}
    samples = await scrape(api)
    assert samples["kvrecall_tier_failed", "nvme", name] == 1
    assert samples["kvrecall_tier_failed", "ram", name] == 0
