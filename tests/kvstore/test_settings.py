"""Settings of tiers."""

from kvstore.settings import StoreSettings


def test_two_stores_of_the_same_tiers_have_half_of_each_limit() -> None:
    halves = StoreSettings(nvme_bytes=1000, nvme_reserve_bytes=50, cold_bytes=600).halve()
    assert halves.cold_bytes == 300
    assert (halves.nvme_bytes, halves.redis_bytes, halves.nvme_reserve_bytes) == (500, None, 50)
