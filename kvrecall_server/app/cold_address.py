"""The address of the configured bucket. Imports no library of workers: gateways check it too."""

from kvstore.errors import TierSettingsError
from kvstore.settings import StoreSettings
from kvstore.tiers.bucket.address import BucketAddress, parse_bucket


def require_cold_address(tiers: StoreSettings) -> BucketAddress:
    """The address of the configured bucket. Raises TierSettingsError for one that cannot be used."""
    assert tiers.cold_url is not None, "a bucket is configured"
    if tiers.redis_url is not None:
        raise TierSettingsError(
            "pages move into a bucket from a worker's own files, and with "
            "KVRECALL_STORE__REDIS_URL they lie in Redis: set one of the two"
        )
    return parse_bucket(tiers.cold_url, tiers.cold_endpoint, tiers.cold_region)
