"""Migration of a Redis namespace, by one process at a time, safe to interrupt and repeat.

The version key has the version, or `A>B` while a migration from A to B is unfinished: no program
then takes the namespace for complete. A lock that expires keeps a second process from doing the
same work. It need not be exact: the migrations themselves bear being run twice.
"""

import asyncio
import re
import time
from secrets import token_hex

from kvrecall.domain.errors import CatalogError
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.migrations.passes import run_passes
from services.catalog.redis.migrations.versions import MIGRATIONS, SCHEMA_VERSION
from services.catalog.versions import CatalogUpgrade, build_catalog_version

_LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.1
# The longest wait for another process that migrates.
_WAIT_SECONDS = 600.0
_MARKER = re.compile(r"(\d+)(?:>(\d+))?")


async def migrate(redis: CatalogRedis, keys: Keys) -> CatalogUpgrade:
    """Note the version in a new namespace, or bring an older namespace to the current version.

    A migration that another process runs is waited for; one that it left unfinished is finished.
    Raises CatalogVersion for a version that cannot be read, CatalogError when Redis does not answer
    or the other process takes too long.
    """
    location = _get_location(keys)
    current = str(SCHEMA_VERSION)
    marker = await _read_marker(redis, keys)
    if not marker:
        await _set_marker(redis, keys, "", current)
        return CatalogUpgrade(location, None, SCHEMA_VERSION)
    found = _parse_marker(keys, marker)
    lock = _Lock(redis, keys)
    last = time.monotonic() + _WAIT_SECONDS
    while (marker := await _read_marker(redis, keys)) != current:
        _parse_marker(keys, marker)
        if await lock.acquire():
            try:
                await _run(redis, keys, lock)
            finally:
                await lock.release()
        elif time.monotonic() > last:
            raise CatalogError(
                f"{location} is being migrated by another process for more than "
                f"{_WAIT_SECONDS:g} seconds; see whether that process still runs, then try again"
            )
        else:
            await asyncio.sleep(_POLL_SECONDS)
    return CatalogUpgrade(location, found, SCHEMA_VERSION)


async def _run(redis: CatalogRedis, keys: Keys, lock: "_Lock") -> None:
    """Run the migrations that are left. The lock is held."""
    marker = await _read_marker(redis, keys)
    for version in range(_parse_marker(keys, marker), SCHEMA_VERSION):
        running = f"{version}>{version + 1}"
        await _set_marker(redis, keys, marker, running)
        await run_passes(redis, keys, MIGRATIONS[version], lock.keep)
        marker = str(version + 1)
        await _set_marker(redis, keys, running, marker)


async def _read_marker(redis: CatalogRedis, keys: Keys) -> str:
    """Return the value of the version key, empty if there is none."""
    return ((await redis.read(keys.version, "GET", keys.version)) or b"").decode()


async def _set_marker(redis: CatalogRedis, keys: Keys, old: str, new: str) -> None:
    call = ("EVAL", scripts.SET_IF_EQUAL, 1, keys.version, new, old, "")
    found = (await redis.write(keys.version, *call)).decode()
    if found != new:
        _parse_marker(keys, found)
        raise CatalogError(
            f"the version of {_get_location(keys)} changed from {old or 'none'!r} to {found!r} "
            "meanwhile: another process opens it too; try again"
        )


def _parse_marker(keys: Keys, marker: str) -> int:
    """Return the version a namespace has, or had before an unfinished migration.

    Raises CatalogVersion if this program can neither read nor migrate it.
    """
    match = _MARKER.fullmatch(marker)
    version = int(match[1]) if match else -1
    target = int(match[2] or version) if match else -1
    readable = version == SCHEMA_VERSION or version in MIGRATIONS
    if not readable or target > SCHEMA_VERSION:
        raise build_catalog_version(_get_location(keys), marker, SCHEMA_VERSION, min(MIGRATIONS))
    return version


def _get_location(keys: Keys) -> str:
    return f"the namespace {keys.namespace!r} in Redis"


class _Lock:
    """The right to migrate a namespace; it expires unless it is kept."""

    def __init__(self, redis: CatalogRedis, keys: Keys) -> None:
        self._redis = redis
        self._name = keys.migration_lock
        self._holder = token_hex(8)
        self._extended_at = 0.0

    async def acquire(self) -> bool:
        """Take the lock; False if another process has it."""
        milliseconds = int(1000 * _LOCK_SECONDS)
        self._extended_at = time.monotonic()
        call = ("EVAL", scripts.EXTEND_LOCK, 1, self._name, self._holder, milliseconds)
        return bool(await self._redis.write(self._name, *call))

    async def keep(self) -> None:
        """Extend the lock when part of its time is over. Raises CatalogError when it was lost."""
        if time.monotonic() - self._extended_at < _LOCK_SECONDS / 3:
            return
        if not await self.acquire():
            raise CatalogError(
                "another process has taken the migration over, as this one stood still; try again"
            )

    async def release(self) -> None:
        """Give the lock back."""
        call = ("EVAL", scripts.DELETE_IF_EQUAL, 1, self._name, self._holder)
        await self._redis.write(self._name, *call)
