"""The Redis tier shares a server; pages expire, and deleted ones a little later than at once."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch

from kvstore.errors import CorruptPageError, TierFullError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageId, PageLayout
from kvstore.tiers.redis import tier as redis_tier
from kvstore.tiers.redis.tier import RedisTier
from tests.every_redis import every_redis
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]
OpenTier = Callable[..., RedisTier]
Until = Callable[..., None]

pytestmark = every_redis


@pytest.fixture
def open_tier(layout: PageLayout, redis_url: str) -> Iterator[OpenTier]:
    """Factory `open_tier(url, **settings)`: a tier in a namespace of this test."""
    opened: list[RedisTier] = []
    namespace = uuid4().hex

    def open_one(url: str = redis_url, layout: PageLayout = layout, **settings: Any) -> RedisTier:
        opened.append(RedisTier(url, layout, **{"namespace": namespace, **settings}))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def get_ids(pages: list[tuple[PageId, bytes]]) -> list[PageId]:
    return [page_id for page_id, _ in pages]


def get_blobs(pages: list[tuple[PageId, bytes]]) -> list[bytes]:
    return [blob for _, blob in pages]


def find_keys(process: Any, page_id: PageId) -> list[bytes]:
    return list(process.client.scan_iter(f"*:p:{page_id.hex()}", count=1000))


def test_models_and_namespaces_are_isolated_from_each_other(
    open_tier: OpenTier, make_page: MakePage, layout: PageLayout
) -> None:
    pages = [make_page(0)]
    one = open_tier()
    one.put(pages)
    others = [
        open_tier(namespace="another"),
        open_tier(layout=replace(layout, fingerprint="model B")),
        open_tier(layout=replace(layout, dtype=torch.float16)),
    ]
    for other in others:
        assert (other.get(get_ids(pages)), list(other.stored()), other.used_bytes) == (
            [None],
            [],
            0,
        )
        other.delete(get_ids(pages))
    assert one.get(get_ids(pages)) == get_blobs(pages)


def test_another_process_sees_the_pages_and_their_bytes(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    pages = [make_page(number) for number in range(6)]
    one = open_tier()
    other = open_tier()
    one.put(pages)
    assert other.get(get_ids(pages)) == get_blobs(pages)
    assert sorted(header.id for header in other.stored()) == sorted(get_ids(pages))
    assert other.count_used_bytes() == one.used_bytes == sum(map(len, get_blobs(pages)))


def test_a_page_that_two_processes_put_is_stored_once(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    one = open_tier()
    other = open_tier()
    first, second = make_page(0, written_at=1), make_page(0, written_at=2)
    one.put([first])
    other.put([second])
    assert one.get([make_id(0)]) == other.get([make_id(0)]) == [second[1]]
    assert one.used_bytes + other.used_bytes == len(first[1])


def test_pages_spread_over_a_cluster(
    open_tier: OpenTier, make_page: MakePage, redis_cluster: list[Any], redis_cluster_url: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(number, "spread") for number in range(40)]
    tier.put(pages)
    assert tier.get(get_ids(pages)) == get_blobs(pages)
    assert tier.contains(get_ids(pages)) == [True] * 40
    assert sorted(header.id for header in tier.stored()) == sorted(get_ids(pages))
    assert tier.used_bytes == tier.count_used_bytes() == sum(map(len, get_blobs(pages)))
    found = [
        sum(bool(find_keys(node, page_id)) for page_id in get_ids(pages))
        for node in redis_cluster[:3]
    ]
    assert sum(found) == 40
    assert min(found) > 5
    tier.keep(get_ids(pages))
    tier.delete(get_ids(pages))
    assert tier.get(get_ids(pages)) == get_blobs(pages), "condemned, not gone"


def test_large_calls_are_split_into_batches(
    open_tier: OpenTier,
    layout: PageLayout,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redis_tier, "BATCH_BYTES", 4 * layout.page_bytes)
    process = redis_process()
    tier = open_tier(process.url)
    pages = [make_page(number) for number in range(10)]
    requested: list[int] = []
    put_batch = tier._put_batch

    def count(batch: dict[PageId, Any]) -> None:
        requested.append(len(batch))
        put_batch(batch)

    monkeypatch.setattr(tier, "_put_batch", count)
    tier.put(pages)
    assert requested == [4, 4, 2]
    assert tier.get([*get_ids(pages), make_id(99)]) == [*get_blobs(pages), None]


def test_pages_expire(open_tier: OpenTier, make_page: MakePage, redis_server: Any) -> None:
    tier = open_tier(ttl_seconds=0.5)
    pages = [make_page(number, "short-lived") for number in range(4)]
    tier.put(pages)
    assert tier.used_bytes == sum(map(len, get_blobs(pages)))
    time.sleep(0.7)
    assert (tier.get(get_ids(pages)), list(tier.stored())) == ([None] * 4, [])
    assert tier.count_used_bytes() == 0
    assert not any(find_keys(redis_server, page_id) for page_id in get_ids(pages))


@pytest.mark.parametrize(
    "use", [lambda tier, page: tier.keep([page[0]]), lambda tier, page: tier.put([page])]
)
def test_a_page_that_is_kept_or_put_again_does_not_expire(
    open_tier: OpenTier, make_page: MakePage, use: Callable[[RedisTier, Any], object]
) -> None:
    tier = open_tier(ttl_seconds=0.8)
    pages = [make_page(0), make_page(1)]
    tier.put(pages)
    for _ in range(12):
        time.sleep(0.1)
        use(tier, pages[1])
    assert open_tier().get(get_ids(pages)) == [None, pages[1][1]]


def test_a_deleted_page_goes_within_two_minutes_unless_somebody_wants_it(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    owner, other = open_tier(), open_tier()
    pages = [make_page(number, "condemned") for number in range(4)]
    owner.put(pages)
    owner.delete(get_ids(pages))

    def left(number: int) -> int:
        (name,) = find_keys(redis_server, pages[number][0])
        return int(redis_server.client.pttl(name))

    assert all(100_000 < left(number) <= 120_000 for number in range(4))
    assert other.get(get_ids(pages)) == get_blobs(pages)
    other.keep([pages[1][0]])
    other.put([pages[2]])
    assert [left(number) > 120_000 for number in range(4)] == [False, True, True, False]


def test_a_page_lives_a_day_until_it_is_kept(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier()
    pages = [make_page(number, "new") for number in range(2)]
    tier.put(pages)
    tier.keep([pages[1][0]])
    names = [name for page_id in get_ids(pages) for name in find_keys(redis_server, page_id)]
    day = 24 * 3600
    assert [redis_server.client.ttl(name) > day for name in names] == [False, True]
    assert redis_server.client.ttl(names[0]) > day - 60


@pytest.mark.parametrize("at", [3, 30, 191, 300])
def test_a_flipped_bit_is_refused_and_the_page_is_replaced(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any, at: int
) -> None:
    tier, other = open_tier(), open_tier()
    pages = [make_page(number, f"flipped {at}") for number in range(2)]
    tier.put(pages)
    (name,) = find_keys(redis_server, pages[0][0])
    redis_server.client.setrange(name, at, bytes([pages[0][1][at] ^ 1]))
    for each in (tier, tier, other):
        with pytest.raises(CorruptPageError, match=f"page {pages[0][0].hex()}"):
            each.get(get_ids(pages))
    assert tier.contains(get_ids(pages)) == [False, True]
    assert tier.get([pages[1][0]]) == [pages[1][1]]
    tier.put(pages)
    assert tier.get(get_ids(pages)) == get_blobs(pages)
    assert tier.contains(get_ids(pages)) == [True, True]
    assert tier.used_bytes == sum(map(len, get_blobs(pages)))
    assert other.get(get_ids(pages)) == get_blobs(pages)
    assert other.contains(get_ids(pages)) == [True, True]


def test_a_page_with_a_broken_header_is_listed(
    make_page: MakePage, layout: PageLayout, redis_process: Any
) -> None:
    process = redis_process()
    tier = RedisTier(process.url, layout)
    tier.put([make_page(0), make_page(1)])
    (name,) = find_keys(process, make_id(0))
    process.client.setrange(name, 30, bytes([make_page(0)[1][30] ^ 1]))
    assert {header.id: header.page_tokens for header in tier.stored()} == {
        make_id(0): 0,
        make_id(1): 8,
    }
    tier.close()


def test_a_server_without_memory_refuses_and_can_be_emptied(
    open_tier: OpenTier, redis_process: Any, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(redis_tier, "_CONDEMNED_MILLISECONDS", 1)
    process = redis_process("maxmemory 24mb", "maxmemory-policy noeviction")
    layout = PageLayout(2, 2, 64, torch.float32, "model A")
    tier = open_tier(process.url, layout, limit_bytes=1 << 30)
    rows = torch.zeros(layout.rows_shape(64))
    stored: list[PageId] = []

    def put(page_id: PageId) -> None:
        tier.put([(page_id, encode_page(layout, page_id, rows, written_at=1))])
        stored.append(page_id)

    def fill() -> None:
        for page_id in make_ids(range(800)):
            put(page_id)

    with pytest.raises(TierFullError, match=r"no memory left.*maxmemory"):
        fill()
    assert 100 < len(stored) < 190
    assert all(tier.contains(stored))
    process.client.config_set("maxmemory", "16mb")
    tier.keep(stored[:1])
    tier.delete(stored[:5])
    until(lambda: not any(tier.contains(stored[:5])))
    assert all(tier.contains(stored[5:]))
    assert tier.count_used_bytes() == (len(stored) - 5) * layout.page_bytes
    gone = stored[5:-5]
    tier.delete(gone)
    until(lambda: not any(tier.contains(gone)))
    put(make_id(1000))
    assert tier.count_used_bytes() == 6 * layout.page_bytes
