"""The durable tiers of a data directory. Imports no torch: checks and archives of files need none."""

from pathlib import Path

from kvrecall_server.app.cold_address import require_cold_address
from kvstore.errors import TierSettingsError
from kvstore.format.page import PageLayout
from kvstore.settings import StoreSettings
from kvstore.tiers.base import Tier
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.redis.tier import RedisTier

# Rows in memory and in files, stored uncompressed.
TIERS = StoreSettings()


def durable_tiers(
    layout: PageLayout | None, data: Path, tiers: StoreSettings = TIERS
) -> list[Tier]:
    """The tiers below RAM, fastest first: files under `data`/pages, then Redis if it is configured.

    The last tier is authoritative. Only Redis needs the layout. Raises TierSettingsError, TierError,
    DirectoryLockedError.
    """
    stack: list[Tier] = [
        BoundedTier(
            NvmeTier(
                data / "pages",
                limit_bytes=tiers.nvme_bytes,
                reserve_bytes=tiers.nvme_reserve_bytes,
            )
        )
    ]
    if tiers.redis_url:
        if layout is None:
            raise TierSettingsError("pages in Redis have names by their model's layout: load it")
        stack.append(_redis_tier(layout, tiers, tiers.redis_url.get_secret_value()))
    return stack


def cold_tier(layout: PageLayout | None, tiers: StoreSettings = TIERS) -> BucketTier | None:
    """The bucket behind the durable tiers; None where none is configured.

    It is created without a request. Raises TierSettingsError.
    """
    if tiers.cold_url is None:
        return None
    address = require_cold_address(tiers)
    if layout is None:
        raise TierSettingsError("pages in a bucket have names by their model's layout: load it")
    return BucketTier(address, layout, limit_bytes=tiers.cold_bytes)


def _redis_tier(layout: PageLayout, tiers: StoreSettings, url: str) -> RedisTier:
    return RedisTier(
        url,
        layout,
        namespace=tiers.redis_namespace,
        ttl_seconds=tiers.redis_ttl_seconds,
        limit_bytes=tiers.redis_bytes,
    )
