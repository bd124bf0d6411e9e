"""Keys over two gateways, in processes of their own: revocation, and windows that they share."""

import time
from collections.abc import Callable

import httpx

from kvrecall.client import KvrecallClient
from tests.end_to_end.servers import Cluster, until

REQUESTS = 20


def ask(address: str, key: str = "") -> int:
    """Return the status of a small request with a key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{address}/v1/sessions", headers=headers).status_code


def test_two_gateways_share_keys_their_revocation_and_their_windows(
    new_cluster: Callable[..., Cluster],
) -> None:
    cluster = new_cluster(
        KVRECALL_ACCESS__PEPPER="a pepper for both gateways",
        KVRECALL_ACCESS__KEY_REQUESTS_PER_MINUTE=str(REQUESTS),
    )
    cluster.start(gateways=2)
    addresses = [gateway.address for gateway in cluster.gateways]
    assert [ask(address) for address in addresses] == [200, 200]  # loopback, and no key yet
    key = cluster.run_keys("create", "--tenant", "ann")
    other = cluster.run_keys("create", "--tenant", "ben")
    until(lambda: [ask(address) for address in addresses] == [401, 401], "keys are needed")

    with (
        KvrecallClient(addresses[0], api_key=key) as ann,
        KvrecallClient(addresses[1], api_key=key) as ann_elsewhere,
    ):
        session = ann.create_session(budget=64).id
        assert ann_elsewhere.turn(session, "hello", max_tokens=2).turn == 1
        assert [found.id for found in ann_elsewhere.list_sessions().sessions] == [session]
    with KvrecallClient(addresses[1], api_key=other) as ben:
        assert ben.list_sessions().sessions == ()

    # The window of the key is one: what is left is given to both in turn.
    statuses = [ask(addresses[number % 2], other) for number in range(REQUESTS + 3)]
    assert statuses == [200] * (REQUESTS - 1) + [429] * 4

    assert [ask(address, key) for address in addresses] == [200, 200]
    cluster.run_keys("revoke", key[4:12])
    revoked_at = time.monotonic()
    time.sleep(max(0.0, revoked_at + 10.0 - time.monotonic()))
    assert [ask(address, key) for address in addresses] == [401, 401]
    for gateway in cluster.gateways:
        log = gateway.log.read_text(encoding="utf-8")
        assert key[12:] not in log
        assert other[12:] not in log
