"""State that is left in the service, the storage and the catalog after all sessions are deleted."""

import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from faults.kinds.flips import page_names
from faults.rig.metrics import read_metrics
from faults.rig.processes import processes_under
from faults.rig.setups import Setup
from kvstore.errors import KvStoreError
from kvstore.tiers.nvme.tier import NvmeTier
from services.catalog.records import CREATION_SECONDS

# Each gateway deletes orphaned pages every 20 seconds (docs/architecture.md), and a worker that is
# away now is asked again by the next sweep: two sweeps, and a third for a machine under load. An
# abandoned creation may have begun with the last fault.
SWEEP_SECONDS = 20.0
LEAK_SECONDS = CREATION_SECONDS + 3 * SWEEP_SECONDS
# Metrics that are 0 in a service without sessions.
EMPTY_METRICS = (
    "kvrecall_worker_slots_in_use",
    "kvrecall_worker_sessions",
    "kvrecall_worker_jobs",
    "kvrecall_turns_running",
    "kvrecall_turns_waiting",
    "kvrecall_tier_bytes nvme",
    "kvrecall_shared_tier_bytes redis",
    "kvrecall_tier_bytes ram",
)
WORKERS_METRIC = "kvrecall_worker_up"
# State of no session: answers to repeated requests are kept up to a number. Keys of Redis that
# expire by themselves, such as the fences of deleted sessions, are no leak. Pauses of deleted
# sessions are unlisted by the sweep that follows KVRECALL_SERVICE__PAUSE_SECONDS.
# A conversation whose creation was not answered has an id that no client knows; it has no items.
KEPT_TABLES = frozenset(
    {"idempotency_records", "sqlite_sequence", "catalog_id", "meta", "conversations"}
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
    ":conversations:",
    ":lengths:",
)
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


def find_leaks_in_storage(setup: Setup) -> list[str]:
    """Pages and files that are left after all sessions were deleted and all processes stopped."""
    found = [leak for folder in setup.pages for leak in _leaks_in_files(folder)]
    if setup.redis is not None and setup.redis.alive:
        with setup.redis.client() as client:
            found += [f"Redis has {name.decode()}" for name in page_names(client)]
    return found + find_leaks_in_catalog(setup)


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
            found += [f"page {header.key} in {folder.parent.name}" for header in tier.stored()]
    except KvStoreError as error:
        found.append(f"{folder.parent.name}: {error}")
    segments = sorted(folder.glob("segment-*.kv"))
    return found + [
        f"{path.name} of {path.stat().st_size} bytes in {folder.parent.name}"
        for path in segments[:-1]
    ]
