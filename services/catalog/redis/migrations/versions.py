"""The version of the Redis catalog's keys and values, and the migrations that lead to it."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.keys import Keys
from services.catalog.redis.migrations import bounded_costs, commit_points, standard_terms

KeepLock = Callable[[], Awaitable[None]]
Migration = Callable[[CatalogRedis, Keys, KeepLock], Awaitable[None]]

# The version that this program writes.
SCHEMA_VERSION = 4

# By the version they start from: the migration to the next version.
MIGRATIONS: Mapping[int, Migration] = MappingProxyType(
    {1: standard_terms.migrate, 2: bounded_costs.migrate, 3: commit_points.migrate}
)
