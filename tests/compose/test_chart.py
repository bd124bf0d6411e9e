"""The chart's pods in containers: their commands, environments, users, rights, volumes, limits and probes as rendered.

No cluster is there: what the kubelet and the claims do, Docker does (`cluster.py`).
"""

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import trustme

from kvrecall.client import KvrecallClient
from tests.compose.cluster import Cluster
from tests.compose.conftest import EXPORTER, Progress
from tests.compose.docker import Docker, DockerFailed
from tests.compose.images import Images
from tests.compose.pod import Pod
from tests.compose.stack import Stack
from tests.conftest import until
from tests.end_to_end.conftest import user
from tests.end_to_end.servers import DEADLINE_SECONDS
from tests.operations.charts import (
    APIS,
    NAMESPACE,
    Object,
    get_environment,
    get_one,
    get_pod,
    render,
    select,
)

KEY = "demonstration-key"
PASSWORD = "demonstrationPassword"
REDIS = "kv-kvrecall-redis"
WORKER = "kv-kvrecall-worker-0"
WORKER_HOST = f"{WORKER}.kv-kvrecall-worker.{NAMESPACE}"
# Workers of one machine; of one with certificates and a folder of its node; of two machines.
ALONE: Sequence[str] = ()
WITH_CERTIFICATES = (
    'tls={"mode": "secret", "gatewaySecret": "gateway-tls", "workerSecret": "worker-tls"}',
    'worker.storage.type="hostPath"',
)
OF_TWO_MACHINES = ('worker.tensorParallel={"size": 2, "machines": 2}',)
LEADER_WORKER_SETS = "leaderworkerset.x-k8s.io/v1"


@dataclass
class Release:
    """The first pod of each component, or as many as the machines of a worker."""

    cluster: Cluster
    redis: Pod
    workers: Sequence[Pod]
    gateway: Pod

    @property
    def objects(self) -> list[Object]:
        """What the chart renders."""
        return self.cluster.objects

    @property
    def pods(self) -> Sequence[Pod]:
        """All pods, in the order of their start."""
        return (self.redis, *self.workers, self.gateway)

    @property
    def url(self) -> str:
        """Address of the gateway."""
        return f"http://{self.gateway.get_address('http')}"

    def logs(self) -> str:
        """The last lines of all containers."""
        return "".join(each.logs() for each in self.pods)


def make_certificates() -> list[Object]:
    """The Secrets with the certificates of gateways and workers, of one authority."""
    authority = trustme.CA()
    return [
        make_secret(name, authority, authority.issue_cert(host))
        for name, host in (("gateway-tls", "gateway"), ("worker-tls", f"{WORKER_HOST}.svc"))
    ]


def make_secret(name: str, authority: trustme.CA, leaf: trustme.LeafCert) -> Object:
    """A Secret of type kubernetes.io/tls with its authority."""
    chain = b"".join(each.bytes() for each in leaf.cert_chain_pems)
    texts = {
        "ca.crt": authority.cert_pem.bytes(),
        "tls.crt": chain,
        "tls.key": leaf.private_key_pem.bytes(),
    }
    data = {key: base64.b64encode(text).decode() for key, text in texts.items()}
    return {"kind": "Secret", "metadata": {"name": name}, "data": data}


@pytest.fixture(
    scope="module",
    params=[ALONE, WITH_CERTIFICATES, OF_TWO_MACHINES],
    ids=["alone", "with certificates", "of two machines"],
)
def release(
    request: pytest.FixtureRequest,
    docker: Docker,
    images: Images,
    project: Stack,
    progress: Progress,
) -> Iterator[Release]:
    """A release of values-demo.yaml, with the images that the compose file's services run. Nothing of it is left."""
    options = ("serviceMonitor.enabled=true", *request.param)
    objects = render("values-demo.yaml", *options, apis=(*APIS, LEADER_WORKER_SETS))
    names = {name: service["image"] for name, service in images.services.items()}
    by_container = {"own-data": names["worker"], **names}
    if EXPORTER in names:
        by_container["exporter"] = names[EXPORTER]
    cluster = Cluster(docker, [*objects, *make_certificates()], by_container)
    cluster.prepare()
    try:
        with progress.step("a release's pods started"):
            started = start(cluster)
        yield started
    finally:
        cluster.remove()


def start(cluster: Cluster) -> Release:
    """Start the pods of a release, and wait until their probes are answered and the worker has joined."""
    objects = cluster.objects
    redis = cluster.start(f"{REDIS}-0", get_pod(get_one(objects, "StatefulSet", "redis")), [REDIS])
    redis.wait()
    release = Release(
        cluster,
        redis,
        start_workers(cluster),
        cluster.start("gateway", get_pod(get_one(objects, "Deployment", "gateway"))),
    )
    wait(release)
    return release


def start_workers(cluster: Cluster) -> list[Pod]:
    """Start the pods of the first worker."""
    hosts = [WORKER_HOST, f"{WORKER_HOST}.svc"]
    if not select(cluster.objects, "LeaderWorkerSet"):
        worker = get_pod(get_one(cluster.objects, "StatefulSet", "worker"))
        return [cluster.start(WORKER, worker, hosts)]
    template = get_one(cluster.objects, "LeaderWorkerSet", "worker")["spec"]["leaderWorkerTemplate"]
    given = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": WORKER_HOST}
    leader, follower = (template[f"{each}Template"]["spec"] for each in ("leader", "worker"))
    return [
        cluster.start(WORKER, leader, hosts, LWS_WORKER_INDEX="0", **given),
        cluster.start(f"{WORKER}-1", follower, LWS_WORKER_INDEX="1", **given),
    ]


def wait(release: Release) -> None:
    """Wait until all probes are answered and the gateway has a worker."""
    for pod in release.pods:
        pod.wait()
    with connect(release) as client:
        until(client.ready, "a worker has joined", DEADLINE_SECONDS)


def connect(release: Release) -> KvrecallClient:
    """A client of the gateway with the key of the chart's Secret."""
    return KvrecallClient(release.url, DEADLINE_SECONDS, api_key=KEY)


def begin(client: KvrecallClient) -> str:
    """Begin a session, whose turn is durable."""
    session = client.create_session(budget=128).id
    assert client.turn(session, [user("Hello.")], max_tokens=2).durable
    return session


def test_a_session_runs_and_is_in_the_charts_redis(release: Release) -> None:
    with connect(release) as client:
        (worker,) = client.workers()
        assert worker.name == WORKER
        begin(client)
    (gateway,) = release.gateway.spec["containers"]
    namespace = get_environment(release.objects, gateway)["KVRECALL_STORE__REDIS_NAMESPACE"]
    keys = release.redis.run("redis", "redis-cli", "--scan", "--pattern", f"{namespace}*")
    assert keys


def test_a_session_goes_on_after_its_worker_was_killed_with_the_volumes_that_are_left(
    release: Release,
) -> None:
    with connect(release) as client:
        session = begin(client)
        release.workers[0].run("worker", "touch", "/var/lib/kvrecall/kept", "/tmp/lost")
        for each in release.workers:
            each.kill()
        release.workers = start_workers(release.cluster)
        wait(release)
        release.workers[0].run("worker", "ls", "/var/lib/kvrecall/kept")
        with pytest.raises(DockerFailed):
            release.workers[0].run("worker", "ls", "/tmp/lost")
        assert client.turn(session, [user("Go on.")], max_tokens=2).turn == 2


def test_prometheus_reads_every_component_as_the_monitors_say(release: Release) -> None:
    pods = {"gateway": release.gateway, "worker": release.workers[0], "redis": release.redis}
    for component, pod in pods.items():
        monitor = get_one(release.objects, "ServiceMonitor", component)
        (endpoint,) = monitor["spec"]["endpoints"]
        url = f"http://{pod.get_address(endpoint['port'])}{endpoint['path']}"
        headers = {}
        if (asked := endpoint.get("authorization")) is not None:
            assert component == "gateway"
            headers = {"authorization": f"{asked['type']} {KEY}"}
            assert httpx.get(url, timeout=60).status_code == 401
        page = httpx.get(url, headers=headers, timeout=60)
        assert page.status_code == 200
        shown = {"redis": "redis_up 1"}.get(component, "kvrecall_build_info")
        assert shown in page.text


def test_the_charts_redis_asks_for_its_password_and_loses_no_commit(release: Release) -> None:
    refused = release.redis.run("redis", "env", "-u", "REDISCLI_AUTH", "redis-cli", "ping")
    assert "NOAUTH" in refused
    wanted = {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory-policy": "noeviction",
        "maxmemory": str(1536 * 10**6),
    }
    for name, value in wanted.items():
        shown = release.redis.run("redis", "redis-cli", "config", "get", name)
        assert shown.split() == [name, value]
    command = release.redis.run("redis", "cat", "/proc/1/cmdline")
    assert "redis-server" in command, "the shell has not become the server, which gets the signals"
    assert PASSWORD not in command


def test_no_container_can_write_to_its_image_or_become_root(release: Release) -> None:
    for pod in release.pods:
        for container in pod.spec["containers"]:
            if container["name"] == "exporter":
                continue  # an image without a shell
            shown = pod.run(
                container["name"],
                *(
                    "sh",
                    "-c",
                    "id -u; touch /usr/new 2>&1; grep -E 'CapEff|NoNewPrivs' /proc/1/status",
                ),
            )
            owner, refused, *limits = shown.splitlines()
            assert int(owner) > 0
            assert "Read-only" in refused
            assert [each.split()[1].strip("0") for each in limits] == ["", "1"]


def test_every_pod_ends_within_its_grace_when_it_is_terminated(release: Release) -> None:
    for pods in ([release.gateway], release.workers, [release.redis]):
        # A set ends the machines of a worker at once.
        with ThreadPoolExecutor() as pool:
            ended = list(pool.map(Pod.end, pods))
        for statuses in ended:
            for container, status in statuses.items():
                assert status in get_statuses(release, container), release.logs()


def get_statuses(release: Release, container: str) -> set[int]:
    """Exit statuses of a container that was terminated; 137: killed after the grace."""
    if container == "exporter":
        return {2, 143}  # not ours; by the signal
    divided = len(release.workers) > 1
    return {1} if container == "worker" and divided else {0}  # torch's launcher ends with 1
