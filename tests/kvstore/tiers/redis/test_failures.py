"""The Redis tier loses no acknowledged page when servers fail, hang or change roles."""

import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from kvstore.errors import TierFailedError
from kvstore.format.page import PageId, PageLayout
from kvstore.tiers.redis import tier as redis_tier
from kvstore.tiers.redis.tier import RedisTier

MakePage = Callable[..., tuple[PageId, bytes]]
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


def get_ids(pages: list[tuple[PageId, bytes]]) -> list[PageId]:
    return [page_id for page_id, _ in pages]


def get_blobs(pages: list[tuple[PageId, bytes]]) -> list[bytes]:
    return [blob for _, blob in pages]


def count_pages(process: Any) -> int:
    return sum(1 for _ in process.client.scan_iter("*:p:*", count=1000))


def put_until_acknowledged(
    tier: RedisTier, page: tuple[PageId, bytes], seconds: float = 15
) -> None:
    last = time.monotonic() + seconds
    while True:
        try:
            tier.put([page])
        except TierFailedError:
            assert time.monotonic() < last, "no server accepted the page"
        else:
            return


def test_an_unreachable_server_is_named_at_the_start(
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


def test_a_wrong_password_is_reported_without_the_password(
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


def test_acknowledged_pages_survive_kill_9_of_the_server(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = redis_process("appendonly yes", "appendfsync always")
    monkeypatch.setattr(redis_tier, "_CONDEMNED_MILLISECONDS", 1)
    tier = open_tier(process.url)
    pages = [make_page(number) for number in range(20)]
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
    expected = [*get_blobs(pages[:3]), None, *get_blobs(pages[4:19]), None]
    assert tier.get(get_ids(pages)) == expected
    tier.check()


def test_a_hanging_server_times_out_and_is_used_again(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = open_tier(process.url, timeout_seconds=0.5)
    page = make_page(0)
    put_until_acknowledged(tier, page)
    process.signal(signal.SIGSTOP)
    with pytest.raises(TierFailedError, match=r"[Tt]ime"):
        tier.get([page[0]])
    process.signal(signal.SIGCONT)
    put_until_acknowledged(tier, page)
    assert tier.get([page[0]]) == [page[1]]


def test_nothing_is_acknowledged_without_a_replica(
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
    put_until_acknowledged(tier, make_page(0))
    assert count_pages(replica) == 1
    replica.signal(signal.SIGSTOP)
    with pytest.raises(TierFailedError, match=r"no replica confirmed a write within 0\.2 s"):
        tier.put([make_page(1)])
    replica.signal(signal.SIGCONT)
    put_until_acknowledged(tier, make_page(1))
    assert count_pages(replica) == 2


def test_a_failover_behind_sentinels_loses_nothing_acknowledged(
    open_tier: OpenTier, make_page: MakePage, redis_behind_sentinels: tuple[Any, Any, str]
) -> None:
    primary, replica, url = redis_behind_sentinels
    tier = open_tier(url)
    pages = [make_page(number) for number in range(60)]
    for page in pages[:30]:
        tier.put([page])
    primary.kill()
    for page in pages[30:]:
        put_until_acknowledged(tier, page)
    assert tier.get(get_ids(pages)) == get_blobs(pages)
    tier.check()
    assert replica.client.role()[0] == b"master"


def test_a_cluster_that_loses_a_primary_loses_nothing_acknowledged(
    open_tier: OpenTier, make_page: MakePage, redis_cluster: list[Any], redis_cluster_url: str
) -> None:
    tier = open_tier(redis_cluster_url)
    pages = [make_page(number) for number in range(24)]
    tier.put(pages[:12])
    redis_cluster[1].kill()
    for page in pages[12:]:
        put_until_acknowledged(tier, page)
    assert tier.get(get_ids(pages)) == get_blobs(pages)
    assert len(list(tier.stored())) == 24
    tier.check()
    redis_cluster[1].start()


@pytest.mark.parametrize("kept", [True, False])
def test_a_page_that_was_condemned_and_saved_survives_a_failover(
    open_tier: OpenTier,
    make_page: MakePage,
    kept: bool,
    redis_behind_sentinels: tuple[Any, Any, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That it lives on is on the replica too, before it is acknowledged."""
    primary, _, url = redis_behind_sentinels
    monkeypatch.setattr(redis_tier, "_CONDEMNED_MILLISECONDS", 4000)
    tier = open_tier(url)
    page = make_page(0)
    tier.put([page])
    tier.delete([page[0]])
    if kept:
        tier.keep([page[0]])
    else:
        tier.put([page])
    primary.kill()
    put_until_acknowledged(tier, make_page(1))
    time.sleep(4)
    assert tier.get([page[0]]) == [page[1]]
