"""The catalogs that are measured: a SQLite file, one Redis, and a cluster of six nodes."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from faults.rig.redis_groups import Shards
from faults.rig.redis_process import RedisProcess, running
from kvrecall_server.app.catalog import open_catalog
from kvrecall_server.app.settings import Settings
from services.catalog.base import Catalog

_SETTLE_SECONDS = 1.0
_WRITES_IN_BACKGROUND = (
    "aof_rewrite_in_progress",
    "aof_rewrite_scheduled",
    "rdb_bgsave_in_progress",
)


@dataclass(frozen=True)
class Backend:
    """A running catalog store.

    `url` is its Redis, None for SQLite. `bytes_used` returns the bytes that it stores, `commands`
    the number of commands that its primaries have run; SQLite has none. `settle` waits until no
    server rewrites its log in the background, as it does while it is filled.
    """

    name: str
    folder: Path
    url: str | None
    bytes_used: Callable[[], int]
    commands: Callable[[], int] | None = None
    settle: Callable[[], None] = lambda: None

    async def open(self) -> Catalog:
        """Open the catalog, as a gateway does."""
        url = None if self.url is None else SecretStr(self.url)
        return await open_catalog(Settings(data=self.folder, catalog_url=url))


@contextmanager
def sqlite(folder: Path) -> Iterator[Backend]:
    """A SQLite file."""
    folder.mkdir(parents=True)

    def bytes_used() -> int:
        return sum(path.stat().st_size for path in folder.glob("catalog.sqlite3*"))

    yield Backend("SQLite", folder, None, bytes_used)
    shutil.rmtree(folder)


@contextmanager
def one_redis(folder: Path) -> Iterator[Backend]:
    """One Redis server that syncs its log before it answers."""
    with running(RedisProcess(folder)) as server:
        yield _redis_backend("one Redis", folder, server.url, [server])


@contextmanager
def cluster(folder: Path) -> Iterator[Backend]:
    """Three primaries with a replica each."""
    with running(Shards(folder, replicas=True)) as shards:
        yield _redis_backend("cluster of six", folder, shards.url, shards.primaries)


def _redis_backend(name: str, folder: Path, url: str, primaries: Sequence[RedisProcess]) -> Backend:
    def read(section: str) -> "list[dict[str, Any]]":
        found = []
        for node in primaries:
            with node.client() as client:
                found.append(client.info(section))
        return found

    def used() -> int:
        return sum(int(memory["used_memory_dataset"]) for memory in read("memory"))

    def commands() -> int:
        # Those of this count itself are not the service's.
        return sum(
            entry["calls"]
            for stats in read("commandstats")
            for command, entry in stats.items()
            if command != "cmdstat_info"
        )

    def settle() -> None:
        while any(found[name] for found in read("persistence") for name in _WRITES_IN_BACKGROUND):
            time.sleep(_SETTLE_SECONDS)

    return Backend(name, folder, url, used, commands, settle)
