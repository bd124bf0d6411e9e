"""The address that a worker advertises: given, or found on the way to the catalog's Redis."""

import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from kvrecall_server.app.advertise import get_advertised_address
from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.redis import redis_client
from kvrecall_server.app.settings import Settings
from services.cluster.registry import RedisRegistry
from tests.end_to_end.servers import Process

ANY = "0.0.0.0:8421"


def settings_with(advertise: str | None, url: str | None = None) -> Settings:
    return Settings.model_validate({"server": {"advertise": advertise}, "catalog_url": url})


def own_address() -> str:
    """An address of this machine that is not loopback, as any connection from it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # documentation's network: nothing is sent
        address: str = probe.getsockname()[0]
    return address


def test_a_given_address_is_advertised_and_the_default_is_where_the_worker_listens() -> None:
    assert get_advertised_address(settings_with("worker.example:9"), ANY) == "worker.example:9"
    assert get_advertised_address(settings_with(None), ANY) == ANY


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://127.0.0.1:6390/0", "127.0.0.1:8421"),
        ("redis://:pass@localhost", "127.0.0.1:8421"),
        ("redis://[::1]:6390", "[::1]:8421"),
        ("redis+sentinel://127.0.0.1:1,127.0.0.2:1/rows", "127.0.0.1:8421"),
        ("redis+cluster://no-such-host.invalid:1,127.0.0.1:2", "127.0.0.1:8421"),
    ],
)
def test_auto_is_the_local_end_of_the_way_to_redis(url: str, expected: str) -> None:
    found = get_advertised_address(settings_with("auto", url), ANY)
    if "localhost" in url:
        assert found in (expected, "[::1]:8421")
    else:
        assert found == expected


def test_auto_on_the_way_to_another_machine_is_no_loopback_address() -> None:
    own = own_address()
    assert not own.startswith("127.")
    found = get_advertised_address(settings_with("auto", "redis://192.0.2.1:6379"), ANY)
    assert found == f"{own}:8421"


def test_auto_that_the_worker_does_not_listen_on_is_refused() -> None:
    wrong = settings_with("auto", "redis://192.0.2.1:6379")
    with pytest.raises(CannotServe, match=r"listens on 127\.0\.0\.1; give --listen 0\.0\.0\.0:7"):
        get_advertised_address(wrong, "127.0.0.1:7")


@pytest.mark.parametrize("url", [None, "unix:///run/redis.sock"])
def test_auto_needs_a_redis_on_the_network(url: str | None) -> None:
    with pytest.raises(CannotServe, match="KVRECALL_CATALOG_URL"):
        get_advertised_address(settings_with("auto", url), ANY)


def test_auto_without_a_way_names_the_host_and_no_password() -> None:
    secret = settings_with("auto", "redis://:hidden@no-such-host.invalid:6379")
    with pytest.raises(CannotServe, match=r"no-such-host\.invalid") as caught:
        get_advertised_address(secret, ANY)
    assert "hidden" not in str(caught.value)


async def test_a_worker_registers_the_address_that_it_found(redis_url: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "KVRECALL_CATALOG_URL": redis_url,
        "KVRECALL_STORE__REDIS_NAMESPACE": "advertised",
        "KVRECALL_SERVER__TOKEN": "the secret of this cluster",
    }
    options = ["--listen", "0.0.0.0:0", "--advertise", "auto", "--data", str(tmp_path / "data")]
    worker = Process("worker", options, tmp_path / "log", settings)
    worker.start()
    registry = RedisRegistry(redis_client(redis_url), "advertised")
    try:
        (record,) = await registry.records()
    finally:
        await registry.close()
        worker.end(signal.SIGTERM)
    expected = f"127.0.0.1:{worker.address.rpartition(':')[2]}"
    assert (record.name, record.address) == (expected, expected)
