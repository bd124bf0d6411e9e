"""Migration from version 2, of kvrecall 0.2.0, to version 3: what is counted is kept as a number.

References are sorted by pages, lengths have a sum, tenants a time. Each key is changed in one step
and only if it has the old form, so a migration may be interrupted, repeated, and run twice at once.
"""

import re
from collections.abc import Awaitable, Callable

from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys

KeepLock = Callable[[], Awaitable[None]]
Step = Callable[[CatalogRedis, str], Awaitable[int]]


async def migrate(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> None:
    """Migrate all keys of the namespace, until a whole pass finds nothing to change.

    Keys may move between the servers of a cluster during a pass. Raises CatalogError.
    """
    while await _run_pass(redis, keys, keep_lock):
        pass


async def _run_pass(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> int:
    """Migrate each key once; return the number of values that were found in their old form."""
    found = 0
    prefix = f"{keys.namespace}:"
    async for key in redis.scan(prefix):
        for pattern, step in _STEPS:
            if pattern.fullmatch(key.removeprefix(prefix)):
                await keep_lock()
                found += await step(redis, key)
    return found


async def _migrate_refs(redis: CatalogRedis, key: str) -> int:
    unverified = f"{key.removesuffix(':sharers')}:unverified"
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_REFS, 2, key, unverified))


async def _migrate_lengths(redis: CatalogRedis, key: str) -> int:
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_LENGTHS, 1, key))


async def _migrate_tenants(redis: CatalogRedis, key: str) -> int:
    return int(await redis.write(key, "EVAL", scripts.MIGRATE_TENANTS, 1, key))


_STEPS: tuple[tuple[re.Pattern[str], Step], ...] = (
    (re.compile(r"\{[^}]*\}:sharers"), _migrate_refs),
    (re.compile(r"lengths:[^:]*"), _migrate_lengths),
    (re.compile(r"tenants"), _migrate_tenants),
)
