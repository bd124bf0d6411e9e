"""The contract of all tiers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest
import torch

from faults.rig.redis_servers import OTHER_KINDS
from kvstore.errors import StoreClosedError, TierFullError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageId, PageLayout
from kvstore.tiers.base import Tier
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis import tier as redis_tier
from kvstore.tiers.redis.tier import RedisTier
from tests.kvstore.page_ids import make_id, make_ids

MakePage = Callable[..., tuple[PageId, bytes]]
Until = Callable[..., None]


KINDS_OF_TIERS = ["ram", "nvme", "bounded", "redis", "redis_cluster", "bucket"]


@pytest.fixture(params=[*KINDS_OF_TIERS, *OTHER_KINDS])
def open_tier(
    request: pytest.FixtureRequest,
    layout: PageLayout,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], Tier]:
    """Factory `open_tier(pages)`: a tier with room for about that many pages."""
    kind = request.param
    server = ""
    if kind in OTHER_KINDS:
        server = request.getfixturevalue("redis_servers")(kind).url
    elif kind.startswith("redis"):
        server = request.getfixturevalue(f"{kind}_url")
    address = request.getfixturevalue("bucket") if kind == "bucket" else None
    # Shared tiers let deleted pages go later: so soon here.
    monkeypatch.setattr(redis_tier, "_CONDEMNED_MILLISECONDS", 50)

    def open_one(pages: int) -> Tier:
        limit = pages * layout.page_bytes
        if kind == "ram":
            return RamTier(limit)
        if address is not None:
            return BucketTier(address, layout, limit_bytes=limit)
        if server:
            return RedisTier(server, layout, namespace=uuid4().hex, limit_bytes=limit)
        files = NvmeTier(tmp_path / "tier", segment_bytes=3 * layout.page_bytes, limit_bytes=limit)
        return BoundedTier(files) if kind == "bounded" else files

    return open_one


@pytest.fixture
def tier(open_tier: Callable[[int], Tier]) -> Iterator[Tier]:
    opened = open_tier(100)
    yield opened
    opened.check()
    opened.close()


def delete(tier: Tier, ids: list[PageId], until: Until) -> None:
    """Delete pages, and wait until they are gone."""
    tier.delete(ids)
    until(lambda: not any(tier.contains(ids)), "the pages are gone")


def test_pages_are_returned_in_the_order_of_the_ids(tier: Tier, make_page: MakePage) -> None:
    pages = [make_page(number) for number in range(7)]
    tier.put(pages)
    ids = [page_id for page_id, _ in pages]
    assert tier.get(ids[::-1]) == [blob for _, blob in pages[::-1]]
    assert tier.contains([*ids, make_id(99)]) == [True] * 7 + [False]


def test_an_unknown_page_is_none(tier: Tier, make_page: MakePage) -> None:
    tier.put([make_page(0)])
    assert tier.get([make_id(1), make_id(0, "other")]) == [None, None]
    assert tier.get([]) == []
    tier.keep([make_id(1)])
    tier.delete([make_id(1)])
    assert tier.contains([make_id(0), make_id(1)]) == [True, False]


def test_a_page_that_is_put_again_replaces_what_was_there(
    tier: Tier, make_page: MakePage, layout: PageLayout
) -> None:
    """It may have been damaged."""
    first, other = make_page(0), make_page(1)
    damaged = encode_page(layout, first[0], torch.zeros(layout.rows_shape(8)), written_at=1)
    tier.put([(first[0], damaged)])
    tier.put([first, other])
    assert tier.get([first[0], other[0]]) == [first[1], other[1]]
    assert tier.used_bytes == 2 * len(first[1])
    tier.check()


def test_time_to_live_is_that_of_redis(tier: Tier) -> None:
    assert tier.life_seconds == (1209600 if tier.name == "redis" else None)


def test_a_deleted_page_is_gone_and_may_be_put_again(
    tier: Tier, make_page: MakePage, until: Until
) -> None:
    pages = [make_page(number) for number in range(3)]
    tier.put(pages)
    delete(tier, [pages[1][0], make_id(0, "never")], until)
    assert tier.contains([page_id for page_id, _ in pages]) == [True, False, True]
    assert tier.get([pages[1][0]]) == [None]
    again = make_page(1, written_at=9)
    tier.put([again])
    assert tier.get([again[0]]) == [again[1]]


def test_used_bytes_are_those_of_the_stored_pages(
    tier: Tier, make_page: MakePage, until: Until
) -> None:
    pages = [make_page(number) for number in range(6)]
    tier.put(pages)
    assert tier.used_bytes == sum(len(blob) for _, blob in pages)
    delete(tier, [page_id for page_id, _ in pages], until)
    if isinstance(tier, RedisTier):
        tier.count_used_bytes()  # that pages expired is unseen until the next count
    assert tier.used_bytes == 0


def test_stored_and_the_ids_list_every_page_once(
    tier: Tier, make_page: MakePage, until: Until
) -> None:
    tier.put([make_page(number, written_at=100 + number) for number in (0, 1, 0, 2, 3)])
    delete(tier, [make_id(2)], until)
    found = sorted((header.id, header.written_at) for header in tier.stored())
    assert found == sorted((make_id(number), 100 + number) for number in (0, 1, 3))
    assert {header.page_tokens for header in tier.stored()} == {8}
    assert sorted(tier.list_ids(103)) == sorted(make_ids(range(2)))
    assert sorted(tier.list_ids(1 << 40)) == sorted(page_id for page_id, _ in found)


def test_pages_from_the_future_are_old(tier: Tier, make_page: MakePage) -> None:
    """The clock has gone back since: nobody waits until it has caught up."""
    now = int(time.time())
    tier.put([make_page(number, written_at=at) for number, at in enumerate((now, now + 3600))])
    assert tier.list_ids(now - 60) == [make_id(1)]


def test_a_tier_describes_itself(tier: Tier, layout: PageLayout) -> None:
    expected = {"ram": (False, False), "nvme": (True, False), "redis": (True, True)}
    expected["bucket"] = (True, True)
    assert (tier.durable, tier.shared) == expected[tier.name]
    assert tier.limit_bytes == 100 * layout.page_bytes


def test_a_full_tier_refuses_and_keeps_its_pages(
    open_tier: Callable[[int], Tier], make_page: MakePage
) -> None:
    tier = open_tier(2)
    pages = [make_page(0), make_page(1)]
    tier.put(pages)
    with pytest.raises(TierFullError, match="raise its limit"):
        tier.put([make_page(2)])
    tier.keep([page_id for page_id, _ in pages])
    assert tier.get([page_id for page_id, _ in pages]) == [blob for _, blob in pages]
    tier.check()
    tier.close()


def test_a_full_tier_accepts_pages_again_after_a_delete(
    open_tier: Callable[[int], Tier], make_page: MakePage, until: Until
) -> None:
    tier = open_tier(3)
    tier.put([make_page(number) for number in range(3)])
    delete(tier, make_ids(range(3)), until)
    if isinstance(tier, RedisTier):
        tier.count_used_bytes()
    tier.put([make_page(7)])
    assert tier.contains([make_id(7)]) == [True]
    tier.close()


def test_a_closed_tier_refuses_calls(open_tier: Callable[[int], Tier], make_page: MakePage) -> None:
    tier = open_tier(2)
    tier.put([make_page(0)])
    tier.close()
    tier.close()
    for page in (make_page(0), make_page(1)):
        with pytest.raises(StoreClosedError):
            tier.put([page])
    with pytest.raises(StoreClosedError):
        tier.get([make_id(0)])


def test_threads_do_not_interfere(tier: Tier, make_page: MakePage) -> None:
    wrong: list[PageId] = []
    finished: list[str] = []

    def work(chain: str) -> None:
        for turn in range(20):
            page_id, blob = make_page(turn % 5, chain)
            tier.put([(page_id, blob)])
            if tier.get([page_id]) != [blob]:
                wrong.append(page_id)
            if turn % 7 == 6:
                tier.delete([page_id])
        finished.append(chain)

    threads = [Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, sorted(finished)) == ([], ["a", "b", "c", "d"])


def test_threads_that_put_the_same_pages_store_them_once(tier: Tier, make_page: MakePage) -> None:
    pages = [make_page(number) for number in range(30)]

    def put_all() -> None:
        for page in pages:
            tier.put([page])

    threads = [Thread(target=put_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.get([page_id for page_id, _ in pages]) == [blob for _, blob in pages]
    assert tier.used_bytes == sum(len(blob) for _, blob in pages)
