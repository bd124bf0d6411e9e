"""Set-ups under faults: one process, workers with files only, or a cluster on one Redis."""

import base64
import json
import secrets
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from faults.rig.clock import RANKS
from faults.rig.disks import Disk, new_disk
from faults.rig.drive import Drive
from faults.rig.ports import free_port
from faults.rig.processes import ServerProcess
from faults.rig.proxy import Proxy
from faults.rig.redis_process import RedisProcess
from faults.rig.zygote import Zygote
from kvrecall_server.app.settings import Settings
from reference import MODEL_PATH
from services.catalog.encryption.settings import EncryptionSettings

DISK_BYTES = 512 << 20
# Of the reference model 190 pages: idle sessions' rows are read from files or Redis again. Less would now and
# then leave a running session without the memory to retrieve from, and its answer would be another one.
RAM_BYTES = 64 << 20
# Pages of turns that were not committed are deleted within a minute, not in an hour.
UNKNOWN_PAGE_SECONDS = 30.0
SWEEP_SECONDS = 10.0
SWEEPS = {
    "KVRECALL_SERVICE__UNKNOWN_PAGE_SECONDS": str(UNKNOWN_PAGE_SECONDS),
    "KVRECALL_SERVICE__SWEEP_SECONDS": str(SWEEP_SECONDS),
}
KEYS_FILE = "KVRECALL_ENCRYPTION__KEYS_FILE"
LIMITS = ("--slots", "2", "--budget", "256", "--block", "64")


@dataclass(frozen=True)
class Rig:
    """Model and means of all set-ups of a run; without `shim` there are no simulated drives.

    `ranks`: processes between which each worker that is one by itself divides the model's heads.
    """

    model: Path
    zygote: Zygote | None = None
    shim: Path | None = None
    ranks: int = 1

    def drive(
        self, folder: Path, name: str, folders: Sequence[Path], append_only: bool = False
    ) -> Drive | None:
        """A drive with these folders, for the process `name` of the set-up in `folder`."""
        if self.shim is None:
            return None
        for each in folders:
            each.mkdir(parents=True, exist_ok=True)
        return Drive(self.shim, folders, folder / f"{name}.drive", append_only)


@dataclass
class Setup:
    """Processes that serve together, and the proxies between them.

    `data` has a folder for each worker. `catalog` are the settings of the gateways' catalog.
    `bad_exits` are the nonzero exits of processes that were to end by themselves, `cut_off` the
    times (Unix, start and end) in which a worker did not reach Redis.
    """

    kind: str
    folder: Path
    data: Path
    rig: Rig
    disk: Disk
    workers: list[ServerProcess]
    gateways: list[ServerProcess]
    urls: list[str]
    operations: list[str]
    catalog: Settings
    redis: RedisProcess | None = None
    to_workers: list[Proxy] = field(default_factory=list)
    to_redis: list[Proxy] = field(default_factory=list)
    bad_exits: list[str] = field(default_factory=list)
    cut_off: list[tuple[float, float]] = field(default_factory=list)

    @property
    def servers(self) -> list[ServerProcess]:
        """All kvrecall processes, workers before gateways."""
        return [
            *self.workers,
            *(gateway for gateway in self.gateways if gateway not in self.workers),
        ]

    @property
    def redis_url(self) -> str:
        """URL of Redis, without a proxy."""
        assert self.redis is not None, "a cluster has one"
        return self.redis.url

    @property
    def drives(self) -> list[Drive]:
        """Simulated drives of all processes."""
        redis = [] if self.redis is None else [self.redis.drive]
        found = [server.drive for server in self.servers] + redis
        return [drive for drive in found if drive is not None]

    @property
    def pages(self) -> list[Path]:
        """Folders of segment files, one for each rank of each worker."""
        return [folder for server in self.workers for folder in self.get_pages(server)]

    @property
    def ids(self) -> list[int]:
        """Ids of all running kvrecall processes."""
        return [process for server in self.servers for process in server.processes]

    def get_pages(self, worker: ServerProcess) -> list[Path]:
        """Folders of a worker's segment files, one for each of its ranks."""
        data, count = self.data / worker.name, self.rig.ranks
        if count == 1 or worker.command != "worker":
            return [data / "pages"]
        return [data / f"rank-{rank}-of-{count}" / "pages" for rank in range(count)]

    def start(self) -> None:
        """Start everything: Redis, workers, gateways. Raises ServerNotReady, TimeoutError."""
        if self.redis is not None:
            self.redis.start()
        start_all(self.workers)
        start_all([gateway for gateway in self.gateways if gateway not in self.workers])

    def stop(self) -> list[str]:
        """Stop all kvrecall processes in order; returns a text for each nonzero exit code."""
        failed = list(self.bad_exits)
        for server in reversed(self.servers):
            if (code := server.stop()) != 0:
                failed.append(f"{server.name} ended with {code}")
        return failed

    def kill(self) -> None:
        """Kill all processes at once."""
        for server in self.servers:
            server.kill()
        if self.redis is not None:
            self.redis.kill()

    def close(self) -> None:
        """Kill all processes that still run, close the proxies and release the disk."""
        self.kill()
        for proxy in (*self.to_workers, *self.to_redis):
            proxy.close()
        self.disk.close()


def start_all(servers: Sequence[ServerProcess]) -> None:
    """Start servers in parallel. Raises ServerNotReady."""
    with ThreadPoolExecutor(max(1, len(servers))) as pool:
        list(pool.map(ServerProcess.start, servers))


def endless_model(folder: Path, source: Path = MODEL_PATH, window: int | None = None) -> Path:
    """A copy of a model without end of turn: its answers have the maximum length.

    window: tokens of its context, if that is to be shorter.
    """
    model = folder / "endless"
    if model.exists():
        return model
    shutil.copytree(source, model)
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text(encoding="utf-8"))
        changed = {"eos_token_id": config["pad_token_id"]}
        if window is not None and "max_position_embeddings" in config:
            changed["max_position_embeddings"] = window
        (model / name).write_text(json.dumps(config | changed), encoding="utf-8")
    return model


def embedded(folder: Path, rig: Rig) -> Setup:
    """One `kvrecall serve` with a SQLite catalog, and all files on one disk that may fill up."""
    return _embedded(folder, folder / "disk", new_disk(folder / "disk", DISK_BYTES), rig)


def embedded_apart(folder: Path, rig: Rig) -> Setup:
    """One `kvrecall serve` with the rows' files on a disk of their own.

    When that is full, turns are still accepted.
    """
    disk = new_disk(folder / "disk", DISK_BYTES)
    for path in (folder / "disk" / "pages", folder / "data" / "serve"):
        path.mkdir(parents=True)
    (folder / "data" / "serve" / "pages").symlink_to(folder / "disk" / "pages")
    return _embedded(folder, folder / "data", disk, rig)


def _embedded(folder: Path, data: Path, disk: Disk, rig: Rig) -> Setup:
    port = free_port()
    keys = _write_keys(folder)
    folders = [data / "serve", *(path for path in [folder / "disk" / "pages"] if path.exists())]
    serve = ServerProcess(
        "serve",
        "serve",
        ["--host", "127.0.0.1", "--port", str(port), "--data", str(data / "serve"), *LIMITS],
        {
            "KVRECALL_MODEL": str(rig.model),
            "KVRECALL_RAM_BYTES": str(RAM_BYTES),
            KEYS_FILE: str(keys),
            **SWEEPS,
        },
        folder,
        rig.zygote,
        rig.drive(folder, "serve", folders),
    )
    url = f"http://127.0.0.1:{port}"
    catalog = Settings(data=data / "serve", encryption=EncryptionSettings(keys_file=keys))
    return Setup("embedded", folder, data, rig, disk, [serve], [serve], [url], [], catalog)


def files_only(folder: Path, rig: Rig) -> Setup:
    """Two workers with files only, listed by address, and a gateway with a SQLite catalog."""
    disk = new_disk(folder / "disk", DISK_BYTES)
    setup = Setup("files only", folder, folder / "disk", rig, disk, [], [], [], [], Settings())
    for number in (1, 2):
        _add_worker(setup, f"worker-{number}", {})
    workers = ",".join(f"127.0.0.1:{proxy.port}" for proxy in setup.to_workers)
    data = folder / "disk" / "gateway"
    _add_gateway(setup, "gateway", data, ["--worker", workers], {})
    setup.catalog = Settings(data=data)
    return setup


def cluster(
    folder: Path,
    rig: Rig,
    redis_settings: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
    url: str | None = None,
    encrypted: bool = True,
) -> Setup:
    """Two workers and two gateways on one Redis with catalog and rows, and proxies between them.

    Redis is not on the disk that fills up: with `appendfsync always` it exits when it cannot write.
    With `encrypted` what is said is encrypted at rest. `more` is added to the environment of all
    processes. With `url` the Redis is there, not started and stopped with the set-up, and has no
    proxies to it.
    """
    disk = new_disk(folder / "disk", DISK_BYTES)
    keys = _write_keys(folder) if encrypted else None
    redis = None
    if url is None:
        drive = rig.drive(folder, "redis", [folder / "redis"], append_only=True)
        redis = RedisProcess(folder / "redis", redis_settings, drive)
    setup = Setup("cluster", folder, folder / "disk", rig, disk, [], [], [], [], Settings(), redis)
    for number in (1, 2):
        link = url or _redis_url(setup)
        environment = {
            "KVRECALL_STORE__REDIS_URL": link,
            "KVRECALL_CATALOG_URL": link,
            "KVRECALL_SERVER__NAME": f"worker-{number}",
        }
        _add_worker(setup, f"worker-{number}", environment | dict(more or {}))
    for number in (1, 2):
        name = f"gateway-{number}"
        environment = {"KVRECALL_CATALOG_URL": url or _redis_url(setup)}
        if keys is not None:
            environment[KEYS_FILE] = str(keys)
        _add_gateway(setup, name, folder / name, [], environment | dict(more or {}))
    setup.catalog = Settings(
        catalog_url=SecretStr(url or setup.redis_url),
        encryption=EncryptionSettings(keys_file=keys),
    )
    return setup


def _add_worker(setup: Setup, name: str, environment: Mapping[str, str]) -> None:
    """A worker that gateways reach through a proxy."""
    port = free_port()
    setup.to_workers.append(Proxy(port))
    operations = f"127.0.0.1:{free_port()}"
    setup.operations.append(f"http://{operations}")
    arguments = ["--listen", f"127.0.0.1:{port}", "--ops", operations]
    arguments += ["--data", str(setup.data / name), *LIMITS]
    if setup.rig.ranks > 1:
        arguments += [RANKS, str(setup.rig.ranks)]
    common = {
        "KVRECALL_MODEL": str(setup.rig.model),
        "KVRECALL_RAM_BYTES": str(RAM_BYTES),
        "KVRECALL_SERVER__ADVERTISE": f"127.0.0.1:{setup.to_workers[-1].port}",
    }
    drive = setup.rig.drive(setup.folder, name, [setup.data / name])
    setup.workers.append(
        ServerProcess(
            name,
            "worker",
            arguments,
            {**common, **environment},
            setup.folder,
            setup.rig.zygote,
            drive,
        )
    )


def _add_gateway(
    setup: Setup, name: str, data: Path, more: Sequence[str], environment: Mapping[str, str]
) -> None:
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--data", str(data), *more]
    drive = setup.rig.drive(setup.folder, name, [data])
    setup.gateways.append(
        ServerProcess(
            name,
            "gateway",
            arguments,
            {**SWEEPS, **environment},
            setup.folder,
            setup.rig.zygote,
            drive,
        )
    )
    setup.urls.append(f"http://127.0.0.1:{port}")


def _write_keys(folder: Path) -> Path:
    """Write a file with a key of encryption at rest."""
    file = folder / "keys"
    file.write_text(f"rig {base64.b64encode(secrets.token_bytes(32)).decode()}\n", "utf-8")
    return file


def _redis_url(setup: Setup) -> str:
    """URL of Redis through a new proxy."""
    assert setup.redis is not None, "a cluster has one"
    setup.to_redis.append(Proxy(setup.redis.port))
    return f"redis://127.0.0.1:{setup.to_redis[-1].port}"
