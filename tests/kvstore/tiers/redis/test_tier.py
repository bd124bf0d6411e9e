"""The Redis tier shares a server, keeps sessions together and expires them as a whole."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch

from kvstore.errors import CorruptPageError, InvariantError, TierFullError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageKey, PageLayout
from kvstore.tiers.redis import tier as redis_tier
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageKey, bytes]]
OpenTier = Callable[..., RedisTier]


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


def get_keys(pages: list[tuple[PageKey, bytes]]) -> list[PageKey]:
    return [key for key, _ in pages]


def get_blobs(pages: list[tuple[PageKey, bytes]]) -> list[bytes]:
    return [blob for _, blob in pages]


def find_keys(process: Any, part: str = "") -> list[bytes]:
    return list(process.client.scan_iter(f"*{part}*", count=1000))


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
        assert (other.get(get_keys(pages)), list(other.stored()), other.used_bytes) == (
            [None],
            [],
            0,
        )
        other.delete(get_keys(pages))
    assert one.get(get_keys(pages)) == get_blobs(pages)


def test_another_process_sees_the_pages_and_their_bytes(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    pages = [make_page(index, session=session) for session in ("a", "b") for index in range(3)]
    one = open_tier()
    other = open_tier()
    one.put(pages)
    assert other.get(get_keys(pages)) == get_blobs(pages)
    assert sorted(header.key for header in other.stored()) == get_keys(pages)
    assert other.count_used_bytes() == one.used_bytes == sum(map(len, get_blobs(pages)))


def test_an_older_version_from_another_process_never_replaces_a_newer_one(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    one = open_tier()
    other = open_tier()
    old = make_page(0, 7, "versions")
    new = make_page(0, 8, "versions", tokens=3)
    one.put([new])
    other.put([old])
    assert one.get([new[0]]) == [new[1]]
    assert not find_keys(redis_server, "versions}:put")
    other.check()


@pytest.mark.parametrize("session", ["a", "tenant/söhne", "{}", "}{", "a}b", "with space", "%7B"])
def test_all_keys_of_a_session_are_in_one_slot(
    open_tier: OpenTier, make_page: MakePage, redis_cluster_url: str, session: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(index, session=session) for index in range(3)]
    tier.put(pages)
    assert tier.get(get_keys(pages)) == get_blobs(pages)
    tier.delete(get_keys(pages)[:2])
    assert [header.key for header in tier.stored()] == [pages[2][0]]
    tier.check()


def test_sessions_spread_over_a_cluster(
    open_tier: OpenTier, make_page: MakePage, redis_cluster: list[Any], redis_cluster_url: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(0, session=f"spread-{number}") for number in range(40)]
    tier.put(pages)
    assert tier.get(get_keys(pages)) == get_blobs(pages)
    assert tier.contains(get_keys(pages)) == [True] * 40
    assert tier.used_bytes == sum(map(len, get_blobs(pages)))
    assert all(len(find_keys(node, "spread-")) > 10 for node in redis_cluster[:3])


def test_large_calls_are_split_into_batches(
    open_tier: OpenTier, layout: PageLayout, redis_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "BATCH_BYTES", 4 * layout.page_bytes)
    process = redis_process()
    tier = open_tier(process.url)
    rows = torch.ones(layout.rows_shape(8))
    pages = [
        (key, bytes(encode_page(layout, key, 1, rows)))
        for key in (PageKey("s", index) for index in range(10))
    ]
    tier.put(pages)
    process.client.config_resetstat()
    assert tier.get(get_keys(pages)) == get_blobs(pages)
    assert process.client.info("commandstats")["cmdstat_mget"]["calls"] == 3
    tier.put([(key, encode_page(layout, key, 2, rows)) for key in get_keys(pages)])
    assert process.client.info("commandstats")["cmdstat_eval"]["calls"] == 3


def test_a_session_expires_as_a_whole_with_its_bytes(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier(ttl_seconds=0.5)
    pages = [make_page(index, session="short-lived") for index in range(4)]
    tier.put(pages)
    assert tier.used_bytes == sum(map(len, get_blobs(pages)))
    time.sleep(0.7)
    assert (tier.get(get_keys(pages)), list(tier.stored())) == ([None] * 4, [])
    assert tier.count_used_bytes() == 0
    assert find_keys(redis_server, "short-lived") == []


@pytest.mark.parametrize(
    "use", [lambda tier, page: tier.get([page[0]]), lambda tier, page: tier.put([page])]
)
def test_a_used_session_does_not_expire(
    open_tier: OpenTier, make_page: MakePage, use: Callable[[RedisTier, Any], object]
) -> None:
    tier = open_tier(ttl_seconds=0.8)
    pages = [make_page(index) for index in range(3)]
    tier.put(pages)
    for _ in range(12):
        time.sleep(0.1)
        use(tier, pages[1])
    assert open_tier().get(get_keys(pages)) == get_blobs(pages)
    assert len(list(open_tier().stored())) == 3


def test_evicted_pages_leave_the_index_when_they_are_read(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier()
    pages = [make_page(index, session="evicted") for index in range(3)]
    tier.put(pages)
    redis_server.client.delete(
        *find_keys(redis_server, "evicted}:0"), *find_keys(redis_server, "evicted}:2")
    )
    with pytest.raises(InvariantError, match=r"page [02] has 0 bytes"):
        tier.check()
    assert tier.get(get_keys(pages)[:2]) == [None, pages[1][1]]
    assert [header.key for header in tier.stored()] == [pages[1][0]]
    assert tier.used_bytes == len(pages[1][1])
    tier.check()


def test_a_flipped_bit_is_refused(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier()
    pages = [make_page(index, session="flipped") for index in range(2)]
    tier.put(pages)
    (name,) = find_keys(redis_server, "flipped}:0")
    redis_server.client.setrange(name, 300, b"\xff" if pages[0][1][300] != 0xFF else b"\0")
    with pytest.raises(CorruptPageError, match="page 0 of session 'flipped'"):
        tier.get(get_keys(pages))
    assert tier.get([pages[1][0]]) == [pages[1][1]]


def test_ended_sessions_are_unregistered_after_an_hour(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = open_tier(process.url)
    pages = [make_page(0, session=session) for session in ("old", "new", "kept")]
    tier.put(pages)
    tier.delete(get_keys(pages[:2]))
    (sessions,) = find_keys(process, ":sessions")
    for session in ("old", "kept"):
        process.client.zincrby(sessions, -7200, session)
    assert tier.count_used_bytes() == len(pages[2][1])
    assert sorted(process.client.zrange(sessions, 0, -1)) == [b"kept", b"new"]


def test_a_server_without_memory_refuses_and_can_be_emptied(
    open_tier: OpenTier, redis_process: Any
) -> None:
    process = redis_process("maxmemory 24mb", "maxmemory-policy noeviction")
    layout = PageLayout(2, 2, 64, torch.float32, "model A")
    tier = open_tier(process.url, layout, limit_bytes=1 << 30)
    rows = torch.zeros(layout.rows_shape(64))
    keys = [PageKey(session, index) for session in ("a", "b") for index in range(400)]
    stored: list[PageKey] = []

    def fill() -> None:
        for key in keys:
            tier.put([(key, encode_page(layout, key, 1, rows))])
            stored.append(key)

    with pytest.raises(TierFullError, match=r"no memory left.*maxmemory"):
        fill()
    assert 100 < len(stored) < 190
    assert all(tier.contains(stored))
    process.client.config_set("maxmemory", "16mb")
    tier.delete(stored[:5])
    assert all(tier.contains(stored[5:]))
    assert tier.used_bytes == (len(stored) - 5) * layout.page_bytes
    tier.check()
    tier.delete(stored[5:-5])
    assert tier.used_bytes == 5 * layout.page_bytes
    tier.put([(stored[0], encode_page(layout, stored[0], 2, rows))])
    assert tier.used_bytes == 6 * layout.page_bytes
    tier.check()
