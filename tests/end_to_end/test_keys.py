"""Keys over two gateways, in processes of their own: revocation, and windows that they share."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import httpx

from benchmarks.faults.rig.processes import QUIET
from kvrecall.client import KvrecallClient
from tests.end_to_end.servers import Cluster, until

REQUESTS = 20


def run_keys(cluster: Cluster, *words: str) -> str:
    """Run `kvrecall keys` over the cluster's catalog; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvrecall.cli", "keys", *words],
        env=os.environ | QUIET | dict(cluster.environment),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


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
    key = run_keys(cluster, "create", "--tenant", "ann")
    other = run_keys(cluster, "create", "--tenant", "ben")
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
    run_keys(cluster, "revoke", key[4:12])
    revoked_at = time.monotonic()
    time.sleep(max(0.0, revoked_at + 10.0 - time.monotonic()))
    assert [ask(address, key) for address in addresses] == [401, 401]
    for gateway in cluster.gateways:
        log = gateway.log.read_text(encoding="utf-8")
        assert key[12:] not in log
        assert other[12:] not in log
