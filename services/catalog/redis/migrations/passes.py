"""Passes over all keys of a Redis namespace, which migrations are made of."""

import re
from collections.abc import Awaitable, Callable, Sequence

from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys

Step = Callable[[CatalogRedis, str], Awaitable[int]]
"""Migrates one key; returns the number of values that it found in their old form.

A step leaves alone what has the new form already, so that it may be repeated.
"""

Steps = Sequence[tuple[re.Pattern[str], Step]]
"""A migration: the steps of the keys whose names, without the namespace, match the patterns."""


async def run_passes(
    redis: CatalogRedis, keys: Keys, steps: Steps, keep_lock: Callable[[], Awaitable[None]]
) -> None:
    """Run the steps on all keys of the namespace, until a whole pass finds nothing to change.

    Keys may move between the servers of a cluster during a pass. Raises CatalogError.
    """
    while await _run_pass(redis, keys, steps, keep_lock):
        pass


async def _run_pass(
    redis: CatalogRedis, keys: Keys, steps: Steps, keep_lock: Callable[[], Awaitable[None]]
) -> int:
    found = 0
    prefix = f"{keys.namespace}:"
    async for key in redis.scan(prefix):
        for pattern, step in steps:
            if pattern.fullmatch(key.removeprefix(prefix)):
                await keep_lock()
                found += await step(redis, key)
    return found
