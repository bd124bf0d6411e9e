"""State that is left in the service, the storage and the catalog after all sessions are deleted."""

import asyncio
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

import redis

from faults.checks.answers import copy_catalog
from faults.kinds.flips import page_names
from faults.rig.metrics import read_metrics
from faults.rig.processes import processes_under
from faults.rig.setups import SWEEP_SECONDS, UNKNOWN_PAGE_SECONDS, Setup
from kvrecall.domain.page_ids import PageId, split_ids
from kvrecall_server.app.catalog import open_catalog
from kvstore.errors import KvStoreError
from kvstore.tiers.nvme.tier import NvmeTier

# Pages of deleted sessions go at once, or with the collector's next round. A page of a turn that was
# not committed goes with the second sweep that finds it of that age: a third one for a machine under
# load.
LEAK_SECONDS = UNKNOWN_PAGE_SECONDS + 3 * SWEEP_SECONDS
# A page in Redis lives on for so long once it is deleted (docs/operations.md).
CONDEMNED_SECONDS = 120
# Metrics that are 0 in a service without sessions.
EMPTY_METRICS = (
    "kvrecall_worker_slots_in_use",
    "kvrecall_worker_sessions",
    "kvrecall_worker_jobs",
    "kvrecall_turns_running",
    "kvrecall_turns_waiting",
    "kvrecall_tier_bytes nvme",
    "kvrecall_tier_bytes ram",
)
WORKERS_METRIC = "kvrecall_worker_up"
# State of no session: answers to repeated requests are kept up to a number. Keys of Redis that
# expire by themselves are no leak. Pauses of deleted sessions are unlisted by the search that follows
# KVRECALL_SERVICE__PAUSE_SECONDS.
# A conversation whose creation was not answered has an id that no client knows; it has no items.
KEPT_TABLES = frozenset(
    {"idempotency_records", "sqlite_sequence", "catalog_id", "data_keys", "meta", "conversations"}
)
# Entries of writes that broke off, in `conversations` and `lengths`, go with the tenant's later writes.
KEPT_KEYS = (
    ":version",
    ":format",
    ":tenants",
    ":waiting",
    ":catalog-id",
    ":id",
    ":secret",
    ":data-keys",
    ":conversations:",
    ":lengths:",
)
# A hash of Redis that has a counter, and one field for each session.
ENDS = ":{pages}:ends"
_POLL_SECONDS = 0.2


def find_leaks_in_service(setup: Setup) -> list[str]:
    """State that a service without sessions still has, LEAK_SECONDS after its last deletion.

    Pages are collected in the background; this returns as soon as nothing is left.
    """
    last = time.monotonic() + LEAK_SECONDS
    while (
        found := [
            leak for url in (*setup.urls, *setup.operations) for leak in _leaks_at(setup, url)
        ]
        + find_leaks_in_catalog(setup)
    ) and time.monotonic() < last:
        time.sleep(_POLL_SECONDS)
    return found


def _leaks_at(setup: Setup, url: str) -> list[str]:
    metrics = read_metrics(url)
    if not metrics:
        return [f"{url} gives no metrics"]
    # A gateway that does not reach a worker cannot have deleted what is in it.
    if url in setup.urls and (answering := metrics.get(WORKERS_METRIC, 0.0)) != len(setup.workers):
        return [f"{url}: {answering:.0f} of {len(setup.workers)} workers answer"]
    return [f"{name}: {metrics[name]:.0f}" for name in EMPTY_METRICS if metrics.get(name)]


def find_leaks_in_catalog(setup: Setup) -> list[str]:
    """Rows of tables, or Redis keys, that belong to sessions, though there is none."""
    if setup.catalog.catalog_url is None:
        return _leaks_in_tables(setup.catalog.data / "catalog.sqlite3")
    if setup.redis is None or not setup.redis.alive:
        return []
    namespace = f"{setup.catalog.store.redis_namespace}:"
    with setup.redis.client() as client:
        names = [name.decode() for name in client.scan_iter(f"{namespace}*", count=1000)]
        lasting = [name for name in names if client.ttl(name) == -1]
        lasting = [name for name in lasting if not name.endswith(ENDS) or client.hlen(name) > 1]
    left = [name for name in lasting if not any(part in name for part in KEPT_KEYS)]
    return [f"Redis has {name}" for name in left]


def _leaks_in_tables(path: Path) -> list[str]:
    if not path.exists():
        return []
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        tables = [name for (name,) in names.fetchall() if name not in KEPT_TABLES]
        counts = Counter(
            {
                table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in tables
            }
        )
    return [f"{number} rows in {table}" for table, number in counts.items() if number]


def read_page_ids(setup: Setup) -> frozenset[PageId]:
    """Ids of all sessions' pages, from the catalog itself."""

    async def read() -> frozenset[PageId]:
        with tempfile.TemporaryDirectory() as folder:
            catalog = await open_catalog(copy_catalog(setup.catalog, Path(folder)))
            try:
                sessions = catalog.sessions
                ids = [await sessions.get_page_ids(each) for each in await sessions.get_ids()]
            finally:
                await catalog.close()
        return frozenset(page_id for joined in ids for page_id in split_ids(joined))

    return asyncio.run(read())


def find_leaks_in_storage(setup: Setup, deleted: Collection[PageId]) -> list[str]:
    """Pages and files that are left after all sessions were deleted and all processes stopped.

    Redis keeps pages of turns that were not committed until they expire: of its pages, those that were
    `deleted` are looked for.
    """
    found = [leak for folder in setup.pages for leak in _leaks_in_files(folder)]
    if setup.redis is not None and setup.redis.alive:
        with setup.redis.client() as client:
            found += [f"Redis has {name}" for name in find_lasting(client, deleted)]
    return found + find_leaks_in_catalog(setup)


def find_lasting(client: "redis.Redis", ids: Collection[PageId]) -> list[str]:
    """Keys of those of the pages in Redis that live on for longer than deleted ones."""
    names = {page_id.hex() for page_id in ids}
    found = [name.decode() for name in page_names(client)]
    return [
        name
        for name in found
        if name.rpartition(":")[2] in names and client.ttl(name) > CONDEMNED_SECONDS
    ]


def find_stray_processes(setup: Setup) -> list[str]:
    """Processes of the set-up that still run."""
    return [f"process {number} still runs" for number in processes_under(setup.folder)]


def _leaks_in_files(folder: Path) -> list[str]:
    """Pages in a tier's files, inconsistent segments, unknown files, and superfluous segments."""
    known = {"lock", "catalog-id"}
    found = [
        f"{path.name} in {folder.parent.name}"
        for path in folder.iterdir()
        if path.name not in known and not path.match("segment-*.kv")
    ]
    try:
        with closing(NvmeTier(folder)) as tier:
            tier.check()
            found += [f"page {header.id.hex()} in {folder.parent.name}" for header in tier.stored()]
    except KvStoreError as error:
        found.append(f"{folder.parent.name}: {error}")
    segments = sorted(folder.glob("segment-*.kv"))
    return found + [
        f"{path.name} of {path.stat().st_size} bytes in {folder.parent.name}"
        for path in segments[:-1]
    ]
