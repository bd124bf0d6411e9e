"""Set-ups under faults: everything in one process, or a cluster of processes on one Redis."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGCONT

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from benchmarks.faults.disks import Disk, new_disk
from benchmarks.faults.processes import RedisProcess, ServerProcess, free_port
from benchmarks.faults.proxy import Proxy
from kvrecall.app.settings import Settings
from reference import MODEL_PATH

DISK_BYTES = 192 << 20
# Six pages of the reference model: all but the newest rows are read from files or Redis.
RAM_BYTES = 2 << 20
LIMITS = ("--slots", "2", "--budget", "256", "--block", "64")


@dataclass
class Setup:
    """Processes that serve together, and the proxies between them.

    `data` has a folder for each worker. `catalog` are the settings of the gateways' catalog.
    """

    kind: str
    folder: Path
    data: Path
    model: str
    disk: Disk
    workers: list[ServerProcess]
    gateways: list[ServerProcess]
    urls: list[str]
    catalog: Settings
    redis: RedisProcess | None = None
    to_workers: list[Proxy] = field(default_factory=list)
    to_redis: list[Proxy] = field(default_factory=list)

    @property
    def servers(self) -> list[ServerProcess]:
        """All kvrecall processes, workers before gateways."""
        return [
            *self.workers,
            *(gateway for gateway in self.gateways if gateway not in self.workers),
        ]

    @property
    def pages(self) -> list[Path]:
        """Folders of segment files, one for each worker."""
        return [self.data / server.name / "pages" for server in self.workers]

    @property
    def ids(self) -> list[int]:
        """Ids of all running kvrecall processes."""
        return [
            server.running.pid
            for server in self.servers
            if server.running is not None and server.alive
        ]

    def start(self) -> None:
        """Start everything: Redis, workers, gateways. Raises ServerNotReady, TimeoutError."""
        if self.redis is not None:
            self.redis.start()
        start_all(self.workers)
        start_all([gateway for gateway in self.gateways if gateway not in self.workers])

    def stop(self) -> list[str]:
        """Stop all kvrecall processes in order; returns a text for each nonzero exit code."""
        failed = []
        for server in reversed(self.servers):
            server.send(SIGCONT)
            if (code := server.stop()) != 0:
                failed.append(f"{server.name} ended with {code}")
        return failed

    def close(self) -> None:
        """Kill all processes that still run, close the proxies and release the disk."""
        for server in self.servers:
            server.kill()
        if self.redis is not None:
            self.redis.kill()
        for proxy in (*self.to_workers, *self.to_redis):
            proxy.close()
        self.disk.close()

    def metrics(self, url: str) -> dict[str, float]:
        """Metrics of a gateway by name, summed over labels; those of a tier as `name tier`.

        Empty if it does not answer.
        """
        with suppress(httpx.HTTPError):
            page = httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text
            found: dict[str, float] = {}
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    name = " ".join([sample.name, *filter(None, [sample.labels.get("tier")])])
                    found[name] = found.get(name, 0.0) + sample.value
            return found
        return {}


def start_all(servers: Sequence[ServerProcess]) -> None:
    """Start servers in parallel. Raises ServerNotReady."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(ServerProcess.start, servers))


def endless_model(folder: Path) -> Path:
    """A copy of the reference model without end of turn: its answers have the maximum length."""
    model = folder / "endless"
    if model.exists():
        return model
    shutil.copytree(MODEL_PATH, model)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text(encoding="utf-8"))
        (model / name).write_text(
            json.dumps(config | {"eos_token_id": config["pad_token_id"]}), encoding="utf-8"
        )
    return model


def embedded(folder: Path, model: Path) -> Setup:
    """One `kvrecall serve` with a SQLite catalog, and all files on one disk that may fill up."""
    return _embedded(folder, folder / "disk", new_disk(folder / "disk", DISK_BYTES), model)


def embedded_apart(folder: Path, model: Path) -> Setup:
    """One `kvrecall serve` with the rows' files on a disk of their own.

    When that is full, turns are still accepted.
    """
    disk = new_disk(folder / "disk", DISK_BYTES)
    for path in (folder / "disk" / "pages", folder / "data" / "serve"):
        path.mkdir(parents=True)
    (folder / "data" / "serve" / "pages").symlink_to(folder / "disk" / "pages")
    return _embedded(folder, folder / "data", disk, model)


def _embedded(folder: Path, data: Path, disk: Disk, model: Path) -> Setup:
    port = free_port()
    serve = ServerProcess(
        "serve",
        "serve",
        ["--host", "127.0.0.1", "--port", str(port), "--data", str(data / "serve"), *LIMITS],
        {"KVRECALL_MODEL": str(model), "KVRECALL_RAM_BYTES": str(RAM_BYTES)},
        folder,
    )
    url = f"http://127.0.0.1:{port}"
    catalog = Settings(data=data / "serve")
    return Setup("embedded", folder, data, str(model), disk, [serve], [serve], [url], catalog)


def cluster(folder: Path, model: Path) -> Setup:
    """Two workers and two gateways on one Redis with catalog and rows, and proxies between them.

    Redis is not on the disk that fills up: with `appendfsync always` it exits when it cannot write.
    """
    disk = new_disk(folder / "disk", DISK_BYTES)
    redis = RedisProcess(folder / "redis")
    setup = Setup(
        "cluster", folder, folder / "disk", str(model), disk, [], [], [], Settings(), redis
    )
    for number in (1, 2):
        _add_worker(setup, f"worker-{number}", model)
    for number in (1, 2):
        _add_gateway(setup, f"gateway-{number}")
    setup.catalog = Settings(catalog_url=SecretStr(f"redis://127.0.0.1:{redis.port}"))
    return setup


def _add_worker(setup: Setup, name: str, model: Path) -> None:
    """A worker that is registered in Redis under the address of a proxy to it."""
    port = free_port()
    setup.to_workers.append(Proxy(port))
    redis = _redis_url(setup)
    arguments = ["--listen", f"127.0.0.1:{port}", "--data", str(setup.data / name), *LIMITS]
    environment = {
        "KVRECALL_MODEL": str(model),
        "KVRECALL_RAM_BYTES": str(RAM_BYTES),
        "KVRECALL_STORE__REDIS_URL": redis,
        "KVRECALL_CATALOG_URL": redis,
        "KVRECALL_SERVER__NAME": name,
        "KVRECALL_SERVER__ADVERTISE": f"127.0.0.1:{setup.to_workers[-1].port}",
    }
    setup.workers.append(ServerProcess(name, "worker", arguments, environment, setup.folder))


def _add_gateway(setup: Setup, name: str) -> None:
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--data", str(setup.folder / name)]
    environment = {"KVRECALL_CATALOG_URL": _redis_url(setup)}
    setup.gateways.append(ServerProcess(name, "gateway", arguments, environment, setup.folder))
    setup.urls.append(f"http://127.0.0.1:{port}")


def _redis_url(setup: Setup) -> str:
    """URL of Redis through a new proxy."""
    assert setup.redis is not None, "a cluster has one"
    setup.to_redis.append(Proxy(setup.redis.port))
    return f"redis://127.0.0.1:{setup.to_redis[-1].port}"
