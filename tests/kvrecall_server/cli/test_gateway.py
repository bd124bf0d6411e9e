"""`kvrecall gateway`: where it finds its workers."""

import pytest

from kvrecall_server.app.settings import Settings
from kvrecall_server.cli.gateway import build_registry
from services.cluster.registry import RedisRegistry, StaticRegistry

REDIS = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("variable", ["KVRECALL_WIRE__TOKEN", "KVRECALL_WIRE__WATCH_SECONDS"])
async def test_another_setting_of_the_wire_names_no_worker(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECALL_CATALOG_URL", REDIS)
    monkeypatch.setenv(variable, "12345678901234567890")
    registry = build_registry(Settings())
    assert isinstance(registry, RedisRegistry)
    await registry.close()


@pytest.mark.parametrize("catalog", [None, REDIS])
async def test_workers_that_are_named_are_those_of_the_cluster(
    catalog: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if catalog is not None:
        monkeypatch.setenv("KVRECALL_CATALOG_URL", catalog)
    monkeypatch.setenv("KVRECALL_WIRE__WORKER", "one:1, two:2")
    registry = build_registry(Settings())
    assert isinstance(registry, StaticRegistry)
    assert [record.address for record in await registry.records()] == ["one:1", "two:2"]


async def test_without_a_catalog_for_several_there_is_one_worker_here() -> None:
    registry = build_registry(Settings())
    assert [record.address for record in await registry.records()] == ["127.0.0.1:8421"]
