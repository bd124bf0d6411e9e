"""The contract of all tiers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest

from kvstore.errors import StoreClosedError, TierFullError
from kvstore.format.page import PageKey, PageLayout, first_sequence
from kvstore.tiers.base import Tier
from kvstore.tiers.bounded import BoundedTier
from kvstore.tiers.nvme.tier import NvmeTier
from kvstore.tiers.ram import RamTier
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageKey, bytes]]


@pytest.fixture(params=["ram", "nvme", "bounded", "redis", "redis_cluster"])
def open_tier(
    request: pytest.FixtureRequest, layout: PageLayout, tmp_path: Path
) -> Callable[[int], Tier]:
    """Factory `open_tier(pages)`: a tier with room for about that many pages."""
    kind = request.param
    server = request.getfixturevalue(f"{kind}_url") if kind.startswith("redis") else ""

    def open_one(pages: int) -> Tier:
        limit = pages * layout.page_bytes
        if kind == "ram":
            return RamTier(limit)
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


def test_pages_are_returned_in_the_order_of_the_keys(tier: Tier, make_page: MakePage) -> None:
    pages = [make_page(index) for index in range(7)]
    tier.put(pages)
    keys = [key for key, _ in pages]
    assert tier.get(keys[::-1]) == [blob for _, blob in pages[::-1]]
    assert tier.contains([*keys, PageKey("s", 99)]) == [True] * 7 + [False]


def test_an_unknown_page_is_none(tier: Tier, make_page: MakePage) -> None:
    tier.put([make_page(0)])
    assert tier.get([PageKey("s", 1), PageKey("other", 0)]) == [None, None]
    assert tier.get([]) == []


def test_the_newer_version_of_a_page_wins_in_either_order(tier: Tier, make_page: MakePage) -> None:
    old = make_page(0, 4, tokens=3)
    new = make_page(0, 5)
    tier.put([old, new])
    assert tier.get([old[0]]) == [new[1]]
    tier.put([old])
    assert tier.get([old[0]]) == [new[1]]
    assert tier.used_bytes == len(new[1])


def test_a_deleted_page_is_gone_and_may_be_put_again(tier: Tier, make_page: MakePage) -> None:
    pages = [make_page(index) for index in range(3)]
    tier.put(pages)
    tier.delete([pages[1][0], PageKey("never", 0)])
    assert tier.contains([key for key, _ in pages]) == [True, False, True]
    again = make_page(1, 9)
    tier.put([again])
    assert tier.get([again[0]]) == [again[1]]


def test_used_bytes_are_those_of_the_stored_pages(tier: Tier, make_page: MakePage) -> None:
    pages = [make_page(index, tokens=index + 1) for index in range(6)]
    tier.put(pages)
    assert tier.used_bytes == sum(len(blob) for _, blob in pages)
    tier.delete([key for key, _ in pages])
    assert tier.used_bytes == 0


def test_stored_lists_every_page_once(tier: Tier, make_page: MakePage) -> None:
    tier.put([make_page(0, 1), make_page(1, 2), make_page(0, 3), make_page(2, 4)])
    tier.delete([PageKey("s", 2)])
    assert sorted((header.key.index, header.sequence) for header in tier.stored()) == [
        (0, 3),
        (1, 2),
    ]


def test_stored_lists_the_pages_of_one_session(tier: Tier, make_page: MakePage) -> None:
    tier.put([make_page(index, session=session) for session in ("a", "b") for index in range(3)])
    tier.delete([PageKey("a", 1)])
    assert sorted(header.key for header in tier.stored("a")) == [PageKey("a", 0), PageKey("a", 2)]
    assert list(tier.stored("never")) == []


def test_a_tier_describes_itself(tier: Tier, layout: PageLayout) -> None:
    expected = {"ram": (False, False), "nvme": (True, False), "redis": (True, True)}
    assert (tier.durable, tier.shared) == expected[tier.name]
    assert tier.limit_bytes == 100 * layout.page_bytes


def test_a_writer_under_the_latest_epoch_is_never_refused(tier: Tier, make_page: MakePage) -> None:
    for epoch in (1, 1, 3):
        tier.fence("s", epoch)
        page = make_page(0, first_sequence(epoch) + 7)
        tier.put([page])
        assert tier.get([page[0]]) == [page[1]]
    tier.delete([PageKey("s", 0)], epoch=3)
    assert tier.contains([PageKey("s", 0)]) == [False]


def test_a_full_tier_refuses_and_keeps_its_pages(
    open_tier: Callable[[int], Tier], make_page: MakePage
) -> None:
    tier = open_tier(2)
    pages = [make_page(0), make_page(1)]
    tier.put(pages)
    with pytest.raises(TierFullError, match="raise its limit"):
        tier.put([make_page(2)])
    assert tier.get([key for key, _ in pages]) == [blob for _, blob in pages]
    tier.check()
    tier.close()


def test_a_full_tier_accepts_pages_again_after_a_delete(
    open_tier: Callable[[int], Tier], make_page: MakePage
) -> None:
    tier = open_tier(3)
    pages = [make_page(index) for index in range(3)]
    tier.put(pages)
    tier.delete([key for key, _ in pages])
    tier.put([make_page(7)])
    assert tier.contains([PageKey("s", 7)]) == [True]
    tier.close()


def test_a_closed_tier_refuses_calls(open_tier: Callable[[int], Tier], make_page: MakePage) -> None:
    tier = open_tier(2)
    tier.close()
    tier.close()
    with pytest.raises(StoreClosedError):
        tier.put([make_page(0)])
    with pytest.raises(StoreClosedError):
        tier.get([PageKey("s", 0)])


def test_threads_do_not_interfere(tier: Tier, make_page: MakePage) -> None:
    wrong: list[PageKey] = []
    finished: list[str] = []

    def work(session: str) -> None:
        for index in range(20):
            key, blob = make_page(index % 5, index + 1, session)
            tier.put([(key, blob)])
            if tier.get([key]) != [blob]:
                wrong.append(key)
            if index % 7 == 6:
                tier.delete([key])
        finished.append(session)

    threads = [Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (wrong, sorted(finished)) == ([], ["a", "b", "c", "d"])
