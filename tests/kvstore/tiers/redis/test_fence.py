"""A fenced session refuses earlier writers for as long as their calls may arrive."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from kvstore.errors import StaleWriterError, TierFailedError
from kvstore.format.page import PageKey, PageLayout, first_sequence
from kvstore.tiers.base import UNFENCED, Tier
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageKey, bytes]]
OpenTier = Callable[[], RedisTier]


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
def open_tier(request: pytest.FixtureRequest, layout: PageLayout) -> OpenTier:
    """Factory `open_tier()`: another process's view of the same Redis."""
    url = request.getfixturevalue(request.param)
    namespace = uuid4().hex
    return lambda: RedisTier(url, layout, namespace=namespace)


def page_under(
    make_page: MakePage, epoch: int, index: int = 0, count: int = 1
) -> tuple[PageKey, bytes]:
    return make_page(index, first_sequence(epoch) + count)


def stored_epochs(tier: Tier) -> list[tuple[int, int]]:
    return sorted((header.key.index, header.epoch) for header in tier.stored("s"))


def test_a_fenced_writer_changes_nothing(open_tier: OpenTier, make_page: MakePage) -> None:
    late = open_tier()
    owner = open_tier()
    late.put([page_under(make_page, 1)])
    owner.fence("s", 2)
    with pytest.raises(StaleWriterError, match="epoch 1, but a writer took over under epoch 2"):
        late.put([page_under(make_page, 1, index=1), page_under(make_page, 1, index=2)])
    with pytest.raises(StaleWriterError):
        late.delete([PageKey("s", 0)], epoch=1)
    with pytest.raises(StaleWriterError):
        late.fence("s", 1)
    assert stored_epochs(owner) == [(0, 1)]
    assert late.get([PageKey("s", 0)]) == [page_under(make_page, 1)[1]]
    owner.put([page_under(make_page, 2, index=1)])
    owner.check()


def test_a_stale_write_is_not_a_server_failure(open_tier: OpenTier, make_page: MakePage) -> None:
    tier = open_tier()
    tier.fence("s", 4)
    with pytest.raises(StaleWriterError) as refused:
        tier.put([page_under(make_page, 3)])
    assert not isinstance(refused.value, TierFailedError)
    tier.put([page_under(make_page, 4)])
    assert stored_epochs(tier) == [(0, 4)]


def test_a_page_raises_the_fence_to_its_own_epoch(open_tier: OpenTier, make_page: MakePage) -> None:
    tier = open_tier()
    tier.put([page_under(make_page, 5)])
    with pytest.raises(StaleWriterError):
        tier.put([page_under(make_page, 4, index=1)])


def test_the_current_owner_may_write_pages_of_an_earlier_epoch(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    tier = open_tier()
    tier.fence("s", 7)
    tier.put([page_under(make_page, 2)], epoch=7)
    with pytest.raises(StaleWriterError):
        tier.put([page_under(make_page, 2, index=1)], epoch=6)
    assert stored_epochs(tier) == [(0, 2)]


def test_a_restored_shared_page_passes_the_fence_and_keeps_it(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    tier = open_tier()
    tier.fence("s", 7)
    tier.put([page_under(make_page, 2)], epoch=UNFENCED)
    assert stored_epochs(tier) == [(0, 2)]
    tier.fence("s", 8)


@pytest.mark.parametrize("fenced_before", [False, True])
def test_a_deleted_session_leaves_only_its_fence(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any, fenced_before: bool
) -> None:
    late = open_tier()
    owner = open_tier()
    late.put([page_under(make_page, 1, index) for index in range(3)])
    if fenced_before:
        owner.fence("s", 2)
    owner.delete([PageKey("s", index) for index in range(3)], epoch=2)
    with pytest.raises(StaleWriterError):
        late.put([page_under(make_page, 1)])
    assert (stored_epochs(owner), owner.count_used_bytes(), owner.contains([PageKey("s", 0)])) == (
        [],
        0,
        [False],
    )
    assert late.get([PageKey("s", 0)]) == [None]
    owner.check()


def test_the_fence_of_a_deleted_session_expires_after_an_hour(
    layout: PageLayout, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = RedisTier(process.url, layout)
    tier.put([page_under(make_page, 1)])
    tier.delete([PageKey("s", 0)], epoch=2)
    assert tier.get([PageKey("s", 0)]) == [None]
    (fence,) = process.client.keys("*{s}*")
    assert process.client.hgetall(fence) == {b"epoch": b"2"}
    assert 3500 < process.client.ttl(fence) <= 3600
    tier.close()


def test_epochs_are_compared_exactly_up_to_the_largest(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    tier = open_tier()
    largest = UNFENCED - 1
    newest = make_page(0, first_sequence(largest) + (1 << 32) - 1)
    tier.put([newest])
    tier.put([make_page(0, first_sequence(largest) + (1 << 32) - 2)])
    assert tier.get([newest[0]]) == [newest[1]]
    with pytest.raises(StaleWriterError):
        tier.put([make_page(1, first_sequence(largest) - 1)])


def test_a_server_without_memory_can_be_fenced(
    layout: PageLayout, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process("maxmemory-policy noeviction")
    tier = RedisTier(process.url, layout)
    tier.put([page_under(make_page, 1)])
    process.client.config_set("maxmemory", "1")
    tier.fence("s", 2)
    tier.delete([PageKey("s", 0)], epoch=3)
    with pytest.raises(StaleWriterError):
        tier.fence("s", 2)
    tier.close()
