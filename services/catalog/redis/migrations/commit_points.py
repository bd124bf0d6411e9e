"""Migration from version 3 to version 4: the commits of each epoch.

Of what was stored before, every version of a page counts up to the length that is committed now. A
session that has a history is left alone, so a migration may be interrupted and repeated.
"""

import re

from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.migrations.passes import Steps


async def _add_first_point(redis: CatalogRedis, key: str) -> int:
    call = ("EVAL", scripts.ADD_FIRST_COMMIT_POINT, 2, key, f"{key}:history")
    return int(await redis.write(key, *call))


STEPS: Steps = ((re.compile(r"\{[^}]*\}"), _add_first_point),)
