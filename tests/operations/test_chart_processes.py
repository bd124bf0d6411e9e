"""The chart's own command lines, environments and Redis, as processes of this machine.

No cluster is there: ports and folders are this machine's, names of Services are 127.0.0.1.
"""

import base64
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis

from faults.rig.ports import free_port
from tests.conftest import until
from tests.end_to_end.servers import Process
from tests.operations.chart_processes import (
    PASSWORD,
    answers,
    build_process,
    get_container,
    start_redis,
)
from tests.operations.charts import Object, get_environment, get_one, get_pod, render, select

KEY = "demonstration-key"


@dataclass
class Release:
    """The processes of a release, with the probes and scrapes that the chart has for each."""

    objects: list[Object]
    gateway: Process
    worker: Process
    operators: str
    redis_server: "subprocess.Popen[bytes]"
    redis: "redis.Redis"

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return self.gateway.address.replace("0.0.0.0", "127.0.0.1")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A release of values-demo.yaml with the first of its workers and gateways."""
    folder = tmp_path_factory.mktemp("release")
    objects = render("values-demo.yaml", "serviceMonitor.enabled=true")
    ports = [free_port() for _ in range(4)]
    host = get_one(objects, "Service", "redis")["metadata"]["name"]
    worker_host = "kv-kvrecall-worker-0.kv-kvrecall-worker.memory.svc"
    replaced = {
        f"{host}:6379": f"127.0.0.1:{ports[0]}",
        worker_host: "127.0.0.1",
        "8421": str(ports[1]),
        "9421": str(ports[2]),
        "8420": str(ports[3]),
        "/var/lib/kvrecall": str(folder / "data"),
    }
    server = start_redis(objects, folder, ports[0])
    client = redis.Redis(port=ports[0], password=PASSWORD)
    started = Release(
        objects,
        build_process(objects, "gateway", folder, replaced),
        build_process(objects, "worker", folder, replaced),
        f"127.0.0.1:{ports[2]}",
        server,
        client,
    )
    try:
        until(lambda: answers(client), "the chart's Redis answers")
        started.worker.start()
        started.gateway.start()
        yield started
    finally:
        started.gateway.end(signal.SIGKILL)
        started.worker.end(signal.SIGKILL)
        client.close()
        server.kill()
        server.wait()


def test_the_probes_of_both_components_are_answered(release: Release) -> None:
    for component, address in (("gateway", release.url), ("worker", f"http://{release.operators}")):
        container = get_container(release.objects, component)
        for name in ("startupProbe", "livenessProbe", "readinessProbe"):
            path = container[name]["httpGet"]["path"]
            assert httpx.get(f"{address}{path}", timeout=60).status_code == 200, (component, path)


def test_prometheus_reads_both_as_the_monitors_say(release: Release) -> None:
    addresses = {"gateway": release.url, "worker": f"http://{release.operators}"}
    for component, address in addresses.items():
        monitor = get_one(release.objects, "ServiceMonitor", component)
        (endpoint,) = monitor["spec"]["endpoints"]
        asked = endpoint.get("authorization")
        assert (asked is not None) == (component == "gateway")
        headers = {}
        if asked is not None:
            (secret,) = select(release.objects, "Secret")
            assert asked["credentials"]["name"] == secret["metadata"]["name"]
            key = base64.b64decode(secret["data"][asked["credentials"]["key"]]).decode()
            headers = {"authorization": f"{asked['type']} {key}"}
            assert httpx.get(address + endpoint["path"], timeout=60).status_code == 401
        page = httpx.get(address + endpoint["path"], headers=headers, timeout=60)
        assert page.status_code == 200
        assert "kvrecall_build_info" in page.text


def test_a_session_runs_and_is_in_the_charts_redis(release: Release) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=release.url, headers=headers, timeout=300) as http:
        (worker,) = http.get("/v1/workers").json()["workers"]
        assert worker["name"] == "kv-kvrecall-worker-0"
        session = http.post("/v1/sessions", json={"budget": 128}).json()["id"]
        turn = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
        sent = http.post(f"/v1/sessions/{session}/turns", json=turn)
        assert sent.status_code == 200, sent.text
    namespace = get_environment(release.objects, get_container(release.objects, "gateway"))[
        "KVRECALL_STORE__REDIS_NAMESPACE"
    ]
    assert [name for name in release.redis.scan_iter() if name.startswith(namespace.encode())]


def test_the_charts_redis_asks_for_its_password_and_loses_no_commit(release: Release) -> None:
    port = release.redis.connection_pool.connection_kwargs["port"]
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    wanted = {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "maxmemory": str(1536 * 10**6),
    }
    assert {name: release.redis.config_get(name)[name] for name in wanted} == wanted
    command = Path(f"/proc/{release.redis_server.pid}/cmdline").read_bytes()
    assert b"redis-server" in command, "the shell has not become the server, which gets the signals"
    assert PASSWORD.encode() not in command


def test_the_processes_end_within_their_grace_when_they_are_terminated(release: Release) -> None:
    for component, process in (("gateway", release.gateway), ("worker", release.worker)):
        kind = {"gateway": "Deployment", "worker": "StatefulSet"}[component]
        pod = get_pod(get_one(release.objects, kind, component))
        running = process.running
        assert running is not None
        running.send_signal(signal.SIGTERM)
        assert running.wait(pod["terminationGracePeriodSeconds"]) == 0
    release.redis_server.send_signal(signal.SIGTERM)
    assert release.redis_server.wait(60) == 0
