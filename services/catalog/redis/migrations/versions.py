"""The version of the Redis catalog's keys and values, and the migrations that lead to it."""

from collections.abc import Mapping
from types import MappingProxyType

from services.catalog.redis.migrations import (
    bounded_costs,
    commit_points,
    global_expiry,
    standard_terms,
)
from services.catalog.redis.migrations.passes import Steps

# The version that this program writes.
SCHEMA_VERSION = 5

# By the version they start from: the migration to the next version.
MIGRATIONS: Mapping[int, Steps] = MappingProxyType(
    {
        1: standard_terms.STEPS,
        2: bounded_costs.STEPS,
        3: commit_points.STEPS,
        4: global_expiry.STEPS,
    }
)
