"""Migration from version 4 to version 5: one set of all sessions that expire, over all tenants.

It is filled from the tenants' own sets. What it has already is left alone, so a migration may be
interrupted and repeated.
"""

import re
from urllib.parse import unquote

from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.conversations.expiry import encode_member
from services.catalog.redis.indexes import decode_scored
from services.catalog.redis.migrations.passes import Steps
from services.catalog.redis.shared_connection import Argument

_ENTRIES_AT_ONCE = 1000


async def _add_tenant(redis: CatalogRedis, key: str) -> int:
    """Add a tenant's sessions to the set of all; it may be in another slot."""
    everything, _, quoted = key.rpartition(":")
    added = first = 0
    while entries := decode_scored(
        await redis.read(key, "ZRANGE", key, first, first + _ENTRIES_AT_ONCE - 1, "WITHSCORES")
    ):
        words = list[Argument]()
        for session_id, at in entries:
            words += [repr(at), encode_member(session_id, unquote(quoted))]
        added += int(await redis.write(everything, "ZADD", everything, "NX", *words))
        first += len(entries)
    return added


STEPS: Steps = ((re.compile(r"expiring:[^:]*"), _add_tenant),)
