"""The Redis tier shares a server politely, keeps sessions together, and loses nothing that it acknowledged."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch

from kvstore.errors import CorruptPageError, InvariantError, TierFailedError, TierFullError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageKey, PageLayout
from kvstore.tiers.redis import tier as redis_tier
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageKey, bytes]]
OpenTier = Callable[..., RedisTier]


@pytest.fixture
def open_tier(layout: PageLayout, redis_url: str) -> Iterator[OpenTier]:
    """open_tier(url, **settings): a tier in a namespace of the test's own."""
    opened: list[RedisTier] = []
    namespace = uuid4().hex

    def open_one(url: str = redis_url, layout: PageLayout = layout, **settings: Any) -> RedisTier:
        opened.append(RedisTier(url, layout, **{"namespace": namespace, **settings}))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def keys_of(pages: list[tuple[PageKey, bytes]]) -> list[PageKey]:
    return [key for key, _ in pages]


def blobs_of(pages: list[tuple[PageKey, bytes]]) -> list[bytes]:
    return [blob for _, blob in pages]


def own_keys(process: Any, part: str = "") -> list[bytes]:
    return list(process.client.scan_iter(f"*{part}*", count=1000))


def put_until_acknowledged(
    tier: RedisTier, page: tuple[PageKey, bytes], seconds: float = 15
) -> None:
    last = time.monotonic() + seconds
    while True:
        try:
            tier.put([page])
        except TierFailedError:
            assert time.monotonic() < last, "no server took the page"
        else:
            return


# Sharing a server


def test_models_and_namespaces_do_not_see_each_other(
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
        assert (other.get(keys_of(pages)), list(other.stored()), other.used_bytes) == (
            [None],
            [],
            0,
        )
        other.delete(keys_of(pages))
    assert one.get(keys_of(pages)) == blobs_of(pages)


def test_another_process_sees_the_pages_and_their_bytes(
    open_tier: OpenTier, make_page: MakePage
) -> None:
    pages = [make_page(index, session=session) for session in ("a", "b") for index in range(3)]
    one = open_tier()
    other = open_tier()
    one.put(pages)
    assert other.get(keys_of(pages)) == blobs_of(pages)
    assert sorted(header.key for header in other.stored()) == keys_of(pages)
    assert other.used_bytes == one.used_bytes == sum(map(len, blobs_of(pages)))


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
    assert not own_keys(redis_server, "versions}:put")
    other.check()


@pytest.mark.parametrize("session", ["a", "tenant/söhne", "{}", "}{", "a}b", "with space", "%7B"])
def test_all_keys_of_a_session_lie_in_one_slot(
    open_tier: OpenTier, make_page: MakePage, redis_cluster_url: str, session: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(index, session=session) for index in range(3)]
    tier.put(pages)
    assert tier.get(keys_of(pages)) == blobs_of(pages)
    tier.delete(keys_of(pages)[:2])
    assert [header.key for header in tier.stored()] == [pages[2][0]]
    tier.check()


def test_sessions_spread_over_a_cluster(
    open_tier: OpenTier, make_page: MakePage, redis_cluster: list[Any], redis_cluster_url: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(0, session=f"spread-{number}") for number in range(40)]
    tier.put(pages)
    assert tier.get(keys_of(pages)) == blobs_of(pages)
    assert tier.contains(keys_of(pages)) == [True] * 40
    assert tier.used_bytes == sum(map(len, blobs_of(pages)))
    assert all(len(own_keys(node, "spread-")) > 10 for node in redis_cluster[:3])


def test_long_lists_of_pages_are_split(
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
    assert tier.get(keys_of(pages)) == blobs_of(pages)
    assert process.client.info("commandstats")["cmdstat_mget"]["calls"] == 3
    tier.put([(key, encode_page(layout, key, 2, rows)) for key in keys_of(pages)])
    assert process.client.info("commandstats")["cmdstat_eval"]["calls"] == 3


# How long pages live


def test_a_session_expires_as_a_whole_and_takes_no_bytes_then(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier(ttl_seconds=0.5)
    pages = [make_page(index, session="short-lived") for index in range(4)]
    tier.put(pages)
    assert tier.used_bytes == sum(map(len, blobs_of(pages)))
    time.sleep(0.7)
    assert (tier.get(keys_of(pages)), list(tier.stored()), tier.used_bytes) == ([None] * 4, [], 0)
    assert own_keys(redis_server, "short-lived") == []


@pytest.mark.parametrize(
    "use", [lambda tier, page: tier.get([page[0]]), lambda tier, page: tier.put([page])]
)
def test_a_session_in_use_stays_as_a_whole(
    open_tier: OpenTier, make_page: MakePage, use: Callable[[RedisTier, Any], object]
) -> None:
    tier = open_tier(ttl_seconds=0.8)
    pages = [make_page(index) for index in range(3)]
    tier.put(pages)
    for _ in range(12):
        time.sleep(0.1)
        use(tier, pages[1])
    assert open_tier().get(keys_of(pages)) == blobs_of(pages)
    assert len(list(open_tier().stored())) == 3


def test_what_redis_lost_leaves_the_books_when_somebody_misses_it(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier()
    pages = [make_page(index, session="evicted") for index in range(3)]
    tier.put(pages)
    redis_server.client.delete(
        *own_keys(redis_server, "evicted}:0"), *own_keys(redis_server, "evicted}:2")
    )
    with pytest.raises(InvariantError, match=r"page [02] has 0 bytes"):
        tier.check()
    assert tier.get(keys_of(pages)[:2]) == [None, pages[1][1]]
    assert [header.key for header in tier.stored()] == [pages[1][0]]
    assert tier.used_bytes == len(pages[1][1])
    tier.check()


def test_a_flipped_bit_is_refused(
    open_tier: OpenTier, make_page: MakePage, redis_server: Any
) -> None:
    tier = open_tier()
    pages = [make_page(index, session="flipped") for index in range(2)]
    tier.put(pages)
    (name,) = own_keys(redis_server, "flipped}:0")
    redis_server.client.setrange(name, 300, b"\xff" if pages[0][1][300] != 0xFF else b"\0")
    with pytest.raises(CorruptPageError, match="page 0 of session 'flipped'"):
        tier.get(keys_of(pages))
    assert tier.get([pages[1][0]]) == [pages[1][1]]


def test_names_of_sessions_that_ended_are_forgotten_when_nobody_can_be_about_to_write_to_them(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = open_tier(process.url)
    pages = [make_page(0, session=session) for session in ("old", "new", "kept")]
    tier.put(pages)
    tier.delete(keys_of(pages[:2]))
    (listing,) = own_keys(process, ":sessions")
    for session in ("old", "kept"):
        process.client.zincrby(listing, -7200, session)
    assert tier.used_bytes == len(pages[2][1])
    assert sorted(process.client.zrange(listing, 0, -1)) == [b"kept", b"new"]


# Room


def test_a_server_without_memory_refuses_and_can_be_emptied(
    open_tier: OpenTier, redis_process: Any
) -> None:
    process = redis_process("maxmemory 24mb", "maxmemory-policy noeviction")
    layout = PageLayout(2, 2, 64, torch.float32, "model A")
    tier = open_tier(process.url, layout)
    rows = torch.zeros(layout.rows_shape(64))
    keys = [PageKey(session, index) for session in ("a", "b") for index in range(400)]
    held: list[PageKey] = []

    def fill() -> None:
        for key in keys:
            tier.put([(key, encode_page(layout, key, 1, rows))])
            held.append(key)

    with pytest.raises(TierFullError, match=r"no memory left.*maxmemory"):
        fill()
    assert 100 < len(held) < 190
    assert all(tier.contains(held))
    process.client.config_set("maxmemory", "16mb")
    tier.delete(held[:5])
    assert all(tier.contains(held[5:]))
    assert tier.used_bytes == (len(held) - 5) * layout.page_bytes
    tier.check()
    tier.delete(held[5:-5])
    assert tier.used_bytes == 5 * layout.page_bytes
    tier.put([(held[0], encode_page(layout, held[0], 2, rows))])
    assert tier.used_bytes == 6 * layout.page_bytes
    tier.check()


# Faults


def test_a_server_that_is_not_there_is_named_at_the_start(
    redis_process: Any, layout: PageLayout, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    process = redis_process()
    process.kill()
    for scheme, tail in (("redis", ""), ("redis+sentinel", "/rows"), ("redis+cluster", "")):
        with pytest.raises(
            TierFailedError, match=f"127.0.0.1:{process.port}{tail} failed"
        ) as failed:
            RedisTier(f"{scheme}://:hunter2@127.0.0.1:{process.port}{tail}", layout)
        assert "hunter2" not in str(failed.value) + caplog.text


def test_a_wrong_password_is_said_without_it(
    redis_process: Any, layout: PageLayout, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    process = redis_process()
    process.client.config_set("requirepass", "secret")
    with pytest.raises(TierFailedError, match=r"invalid username-password pair") as failed:
        RedisTier(f"redis://:hunter2@127.0.0.1:{process.port}", layout)
    assert "hunter2" not in str(failed.value) + caplog.text
    with pytest.raises(TierFailedError, match="Authentication required"):
        RedisTier(process.url, layout)
    RedisTier(f"redis://:secret@127.0.0.1:{process.port}", layout).close()


def test_what_was_acknowledged_outlives_kill_9_of_the_server(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process("appendonly yes")
    tier = open_tier(process.url)
    pages = [make_page(index) for index in range(20)]
    for page in pages[:18]:
        tier.put([page])
    tier.delete([pages[3][0]])
    tier.flush()
    used = tier.used_bytes
    process.kill()
    with pytest.raises(TierFailedError, match="refused"):
        tier.put([pages[18]])
    assert tier.used_bytes == used
    process.start()
    put_until_acknowledged(tier, pages[18])
    wanted = [*blobs_of(pages[:3]), None, *blobs_of(pages[4:19]), None]
    assert tier.get(keys_of(pages)) == wanted
    tier.check()


def test_a_server_that_hangs_is_given_up_and_taken_up_again(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = open_tier(process.url, timeout_seconds=0.05)
    page = make_page(0)
    tier.put([page])
    process.signal(signal.SIGSTOP)
    with pytest.raises(TierFailedError, match=r"[Tt]ime"):
        tier.get([page[0]])
    process.signal(signal.SIGCONT)
    put_until_acknowledged(tier, page)
    assert tier.get([page[0]]) == [page[1]]


def test_nothing_is_acknowledged_that_no_replica_has(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    primary = redis_process("repl-diskless-sync yes", "repl-diskless-sync-delay 0")
    replica = redis_process(f"replicaof 127.0.0.1 {primary.port}")
    while (
        "slave0" not in (info := primary.client.info("replication"))
        or info["slave0"]["state"] != "online"
    ):
        time.sleep(0.02)
    tier = open_tier(primary.url, timeout_seconds=0.2)
    tier.put([make_page(0)])
    names = own_keys(replica)
    assert len(names) == 4
    replica.signal(signal.SIGSTOP)
    with pytest.raises(TierFailedError, match=r"no replica confirmed a write within 0\.2 s"):
        tier.put([make_page(1)])
    replica.signal(signal.SIGCONT)
    put_until_acknowledged(tier, make_page(1))
    assert len(own_keys(replica)) == 5


def test_a_failover_behind_sentinels_loses_nothing_acknowledged(
    open_tier: OpenTier, make_page: MakePage, redis_behind_sentinels: tuple[Any, Any, str]
) -> None:
    primary, replica, url = redis_behind_sentinels
    tier = open_tier(url)
    pages = [make_page(index) for index in range(60)]
    for page in pages[:30]:
        tier.put([page])
    primary.kill()
    for page in pages[30:]:
        put_until_acknowledged(tier, page)
    assert tier.get(keys_of(pages)) == blobs_of(pages)
    tier.check()
    assert replica.client.role()[0] == b"master"


def test_a_cluster_that_loses_a_primary_loses_nothing_acknowledged(
    open_tier: OpenTier, make_page: MakePage, redis_cluster: list[Any], redis_cluster_url: str
) -> None:
    tier = open_tier(redis_cluster_url)
    first = [make_page(0, session=f"before-{number}") for number in range(12)]
    tier.put(first)
    redis_cluster[1].kill()
    second = [make_page(0, session=f"after-{number}") for number in range(12)]
    for page in second:
        put_until_acknowledged(tier, page)
    assert tier.get(keys_of(first + second)) == blobs_of(first + second)
    assert len(list(tier.stored())) == 24
    tier.check()
    redis_cluster[1].start()
