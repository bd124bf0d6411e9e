"""A Redis that evicts any key is no tier: it drops pages that were acknowledged as durable."""

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import TierSettingsError
from kvstore.format.page import PageLayout
from kvstore.tiers.redis.tier import RedisTier


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
def test_a_server_that_evicts_any_key_is_refused_with_what_to_do(
    layout: PageLayout, redis_process: Callable[..., Any], policy: str
) -> None:
    server = redis_process(f"maxmemory-policy {policy}")
    with pytest.raises(TierSettingsError, match=rf"{policy}.*set maxmemory-policy to noeviction"):
        RedisTier(server.url, layout)
    server.client.config_set("maxmemory-policy", "noeviction")
    RedisTier(server.url, layout).close()
