"""Markers of all tests, and real Redis servers: one, a primary behind sentinels, a cluster.

A test of tests/operations, which needs tools that are no Python packages, is `operations`, one of
tests/compose, which needs a Docker daemon, is `compose`, one of LONG_PATHS is `long`. Another is
`integration` if it starts processes or real servers or runs a whole worker over a model, or is one of the
long property tests. Every other test is `unit`.
Property tests have no deadline, so that load fails none.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
import redis
import structlog
from hypothesis import settings

from faults.rig.ports import free_port
from faults.rig.redis_servers import DEFAULT, find_server
from kvstore.tiers.bucket.address import BucketAddress
from tests.bucket_process import BucketProcess

# Property tests draw the same examples in every run, so that a change alone makes them fail; `make explore`
# draws others.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1_000)
settings.load_profile("fixed")

# What processes of the tests serve unless a test names another model: it is small, and its answers greedy.
os.environ.setdefault("KVRECALL_MODEL", "reference")
# Kernels run in Triton's interpreter, unless a machine with a GPU says otherwise. Read when triton is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

TESTS = Path(__file__).parent
# Folders and files whose tests are integration tests, relative to this folder.
INTEGRATION_PATHS = (
    "adversary",
    "benchmarks",
    "clients",
    "docs",
    "end_to_end",
    "evals",
    "examples",
    "faults",
    "gateway",
    "kvrecall_server/admin",
    "kvrecall_server/app",
    "kvrecall_server/cli",
    "kvrecall/client",
    "kvrecall_server/demo",
    "kvrecall_server/ranks",
    "kvrecall_server/test_distributions.py",
    "kvrecall/domain/test_episodes.py",
    "kvstore/test_crash.py",
    "kvstore/test_cold_crash.py",
    "kvstore/test_cold_states.py",
    "kvstore/test_store_fault_states.py",
    "reference/test_model.py",
    "telemetry",
    "workers/engine/test_engine.py",
    "workers/kernels/test_compilation.py",
    "workers/methods/test_contract.py",
    "workers/model/test_families.py",
    "workers/model/test_layer_sensitivity.py",
    "workers/parallel",
    "workers/repair/test_scan.py",
)
# Of these, the half that takes longest: `make long`, not `make test`.
LONG_PATHS = (
    "adversary",
    "benchmarks",
    "clients",
    "end_to_end/models/test_deletions.py",
    "end_to_end/models/test_forks.py",
    "end_to_end/models/test_moves.py",
    "end_to_end/openai/test_agent_of_thirty_calls.py",
    "end_to_end/openai/test_kills.py",
    "end_to_end/test_many_sessions.py",
    "end_to_end/test_openapi.py",
    "end_to_end/test_reselection.py",
    "evals",
    "faults",
    "gateway/test_openapi.py",
    "kvrecall_server/app/test_calibration.py",
    "kvrecall_server/cli/test_eval.py",
)
# Folders whose tests need tools beside Python's packages: they are collected with `-m MARKER` only.
TOOL_PATHS = {"console": "operations", "operations": "operations", "compose": "compose"}
# Lanes that need no other tools than Python's packages.
PYTHON_LANES = ("unit", "integration", "long")
# Fixtures that start a server or a worker; a test that uses one is an integration test wherever it is.
INTEGRATION_FIXTURES = frozenset(
    {"bucket_process", "bucket_server", "make_worker", "redis_process", "redis_processes", "server"}
)
# End of a wait for a condition, which comes within seconds on a machine that is not overloaded.
WAIT_SECONDS = 120.0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of other lanes than the one that is asked for: importing all takes a minute.

    What needs other tools is left out unless it is asked for: without them it cannot be imported.
    """
    lane, asked = find_lane(collection_path), config.option.markexpr
    if lane in TOOL_PATHS.values():
        return None if lane == asked else True
    if asked not in PYTHON_LANES or collection_path.suffix != ".py":
        return None
    possible = ("unit", "integration") if lane is None else (lane,)
    return None if asked in possible else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test as `unit`, `integration`, `long`, `operations` or `compose`."""
    listed = (*INTEGRATION_PATHS, *LONG_PATHS)
    unknown = [path for path in listed if not (TESTS / path).exists()]
    assert not unknown, f"INTEGRATION_PATHS or LONG_PATHS name what is not there: {unknown}"
    for item in items:
        item.add_marker(choose_marker(item))


def choose_marker(item: pytest.Item) -> str:
    """Return the lane of a test: that of its place, else that of its fixtures."""
    lane = find_lane(item.path)
    if lane is not None:
        return lane
    starts = not INTEGRATION_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    return "integration" if starts else "unit"


@cache
def find_lane(path: Path) -> str | None:
    """Return the lane of all tests of a file or folder; None: their fixtures decide.

    A folder of integration tests may have long ones.
    """
    for folder, marker in TOOL_PATHS.items():
        if path.is_relative_to(TESTS / folder):
            return marker
    for paths, marker in ((LONG_PATHS, "long"), (INTEGRATION_PATHS, "integration")):
        if any(path.is_relative_to(TESTS / each) for each in paths):
            return marker
    return None


def _leave_out_variables() -> None:
    """Log tracebacks without the variables of their frames: of a forward pass they take seconds."""
    renderer = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], renderer])


_leave_out_variables()


@pytest.fixture(autouse=True)
def own_log_settings() -> Iterator[None]:
    """Undo what a test's in-process commands change in the settings of logs."""
    before = structlog.get_config()
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    yield
    sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
    structlog.configure(**before)
    logging.captureWarnings(False)
    root.setLevel(level)
    root.handlers = [each for each in root.handlers if each in handlers]


@pytest.fixture(scope="session", autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory of all tests of a run: the user's own is neither read nor written."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["KVRECALL_CACHE"] = str(shared / "cache")
    return shared / "cache"


class RedisProcess:
    """A real redis-server (or sentinel) on a free port, with a directory that outlives a kill."""

    def __init__(self, directory: Path, *settings: str, kind: str = DEFAULT) -> None:
        self._program = find_server(kind)
        self.port = free_port()
        self.directory = directory
        self._config = directory / "redis.conf"
        lines = ["bind 127.0.0.1", f"port {self.port}", f"dir {directory}", 'save ""', *settings]
        self._config.write_text("\n".join(lines))
        self._as_sentinel = ["--sentinel"] * any(line.startswith("sentinel ") for line in lines)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        """Start it, also again after `kill`, and wait until it answers."""
        self._process = subprocess.Popen(
            [self._program, self._config, *self._as_sentinel],
            stdout=subprocess.DEVNULL,
        )
        until(lambda: self._answers(), f"a server on port {self.port} answers")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended"
        try:
            with self.client as client:
                return bool(client.ping())
        except redis.ConnectionError:
            return False


def until(
    done: Callable[[], object], what: str = "the condition", seconds: float = WAIT_SECONDS
) -> None:
    """Wait until `done` holds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="session", name="until")
def make_until() -> Callable[..., None]:
    """until(done, what, seconds): wait until `done` holds; fail after `seconds`."""
    return until


@pytest.fixture(scope="session")
def redis_kind(request: pytest.FixtureRequest) -> str:
    """The kind of server of a test's fixtures; `@every_redis` runs a test on each."""
    return str(getattr(request, "param", DEFAULT))


@pytest.fixture(scope="session")
def redis_processes(
    tmp_path_factory: pytest.TempPathFactory, redis_kind: str
) -> Iterator[Callable[..., RedisProcess]]:
    """Starts servers that tests share: redis_processes(*configuration lines)."""
    yield from started_servers(tmp_path_factory, redis_kind)


@pytest.fixture
def redis_process(
    tmp_path_factory: pytest.TempPathFactory, redis_kind: str
) -> Iterator[Callable[..., RedisProcess]]:
    """Starts servers of the test alone: redis_process(*configuration lines)."""
    yield from started_servers(tmp_path_factory, redis_kind)


def started_servers(
    directories: pytest.TempPathFactory, default_kind: str
) -> Iterator[Callable[..., RedisProcess]]:
    started: list[RedisProcess] = []

    def start(*settings: str, kind: str = default_kind) -> RedisProcess:
        started.append(RedisProcess(directories.mktemp("redis"), *settings, kind=kind))
        return started[-1]

    yield start
    for process in started:
        process.signal(signal.SIGCONT)
        process.kill()


@pytest.fixture(scope="session")
def bucket_server() -> Iterator[BucketProcess]:
    """A server of buckets that tests share."""
    with BucketProcess.started(until) as process:
        yield process


@pytest.fixture
def bucket_process() -> Iterator[BucketProcess]:
    """A server of buckets of the test alone."""
    with BucketProcess.started(until) as process:
        yield process


@pytest.fixture
def bucket(bucket_server: BucketProcess, monkeypatch: pytest.MonkeyPatch) -> BucketAddress:
    """The address of a new bucket, with its credentials in the environment."""
    return bucket_server.create_bucket(monkeypatch)


IMMEDIATE_SYNC = ("repl-diskless-sync yes", "repl-diskless-sync-delay 0")


@pytest.fixture(scope="session")
def redis_servers(
    redis_processes: Callable[..., RedisProcess],
) -> Callable[[str], RedisProcess]:
    """The single server of a kind that tests share: redis_servers(kind)."""
    return cache(lambda kind: redis_processes(kind=kind))


@pytest.fixture(scope="session")
def redis_server(redis_servers: Callable[[str], RedisProcess], redis_kind: str) -> RedisProcess:
    """A single server."""
    return redis_servers(redis_kind)


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisProcess) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def redis_cluster(redis_processes: Callable[..., RedisProcess]) -> list[RedisProcess]:
    """Six nodes: three primaries, then a replica of each in the same order."""
    settings = ("cluster-enabled yes", "cluster-node-timeout 3000", *IMMEDIATE_SYNC)
    nodes = [redis_processes(*settings) for _ in range(6)]
    for epoch, node in enumerate(nodes, 1):
        node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", epoch)
        nodes[0].client.execute_command("CLUSTER MEET", "127.0.0.1", node.port)
    bounds = [0, 5461, 10923, 16384]
    for node, first, last in zip(nodes, bounds[:3], bounds[1:], strict=False):
        node.client.execute_command("CLUSTER ADDSLOTS", *range(first, last))
    until(
        lambda: all(info(node, "cluster_known_nodes") == "6" for node in nodes),
        "the nodes know each other",
    )
    for primary, replica in zip(nodes[:3], nodes[3:], strict=True):
        follow(replica, primary)
    until(lambda: all(info(node, "cluster_state") == "ok" for node in nodes), "the cluster is up")
    until(lambda: all(online_replicas(node) for node in nodes[:3]), "the replicas follow")
    return nodes


def follow(replica: RedisProcess, primary: RedisProcess) -> None:
    """Make a node of a cluster the replica of `primary`."""
    name = primary.client.execute_command("CLUSTER MYID").decode()
    until(
        lambda: name in str(replica.client.execute_command("CLUSTER NODES")),
        "the replica knows its primary",
    )
    replica.client.execute_command("CLUSTER REPLICATE", name)


def info(node: RedisProcess, field: str) -> str:
    return str(node.client.execute_command("CLUSTER INFO")[field])


def online_replicas(node: RedisProcess) -> int:
    """Number of replicas that are in sync with a primary."""
    values = node.client.info("replication").values()
    return sum(isinstance(value, dict) and value.get("state") == "online" for value in values)


@pytest.fixture
def redis_behind_sentinels(
    redis_process: Callable[..., RedisProcess],
) -> tuple[RedisProcess, RedisProcess, str]:
    """A primary, its replica, and the URL of the three sentinels that monitor them."""
    primary = redis_process(*IMMEDIATE_SYNC)
    replica = redis_process(*IMMEDIATE_SYNC, f"replicaof 127.0.0.1 {primary.port}")
    watch = [
        f"sentinel monitor rows 127.0.0.1 {primary.port} 2",
        "sentinel down-after-milliseconds rows 1500",
        "sentinel failover-timeout rows 6000",
    ]
    sentinels = [redis_process(*watch) for _ in range(3)]
    until(lambda: online_replicas(primary), "the replica follows")
    for sentinel in sentinels:
        until(partial(all_known, sentinel), "the sentinels know the replica and each other")
    return (
        primary,
        replica,
        f"redis+sentinel://{','.join(f'127.0.0.1:{s.port}' for s in sentinels)}/rows",
    )


def all_known(sentinel: RedisProcess) -> bool:
    state = sentinel.client.sentinel_master("rows")
    assert isinstance(state, dict)
    return (state["num-slaves"], state["num-other-sentinels"]) == (1, 2)


@pytest.fixture(scope="session")
def redis_cluster_url(redis_cluster: list[RedisProcess]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in redis_cluster[:2])
