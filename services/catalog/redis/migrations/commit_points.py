"""Migration from version 2 to version 3: the commits of each epoch.

Of what was stored before, every version of a page counts up to the length that is committed now. A
session that has a history is left alone, so a migration may be interrupted and repeated.
"""

import re
from collections.abc import Awaitable, Callable

from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys

KeepLock = Callable[[], Awaitable[None]]

_META_KEY = re.compile(r"\{[^}]*\}")


async def migrate(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> None:
    """Give every session a history, until a whole pass finds none without. Raises CatalogError."""
    while await _run_pass(redis, keys, keep_lock):
        pass


async def _run_pass(redis: CatalogRedis, keys: Keys, keep_lock: KeepLock) -> int:
    added = 0
    prefix = f"{keys.namespace}:"
    async for key in redis.scan(prefix):
        if _META_KEY.fullmatch(key.removeprefix(prefix)):
            await keep_lock()
            history = f"{key}:history"
            added += await redis.write(key, "EVAL", scripts.ADD_FIRST_COMMIT_POINT, 2, key, history)
    return added
