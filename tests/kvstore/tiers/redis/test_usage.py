"""The bytes in Redis are a cached number; a silent server costs its callers one short timeout."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any
from uuid import uuid4

import pytest
import redis
import torch

from kvstore.errors import TierFailedError, TierFullError
from kvstore.format.codec import encode_page
from kvstore.format.page import PageId, PageLayout
from kvstore.tiers.redis import usage
from kvstore.tiers.redis.tier import RedisTier
from tests.kvstore.page_ids import make_id

MakePage = Callable[..., tuple[PageId, bytes]]
OpenTier = Callable[..., RedisTier]
Until = Callable[..., None]


@pytest.fixture
def open_tier(layout: PageLayout) -> Iterator[OpenTier]:
    """Factory `open_tier(url, **settings)`: a tier in a namespace of this test."""
    opened: list[RedisTier] = []
    namespace = uuid4().hex

    def open_one(url: str, layout: PageLayout = layout, **settings: Any) -> RedisTier:
        opened.append(RedisTier(url, layout, **{"namespace": namespace, **settings}))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def commands(process: Any) -> int:
    return int(process.client.info("stats")["total_commands_processed"])


def test_reading_the_used_bytes_sends_no_command_however_many_pages_there_are(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any
) -> None:
    process = redis_process()
    tier = open_tier(process.url)
    pages = [make_page(number) for number in range(50)]
    tier.put(pages)
    before = commands(process)
    assert {tier.used_bytes for _ in range(1000)} == {sum(len(blob) for _, blob in pages)}
    assert commands(process) - before < 20, "the background refresh alone"


def test_workers_learn_of_each_others_bytes_without_counting_pages(
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    process = redis_process()
    one, other = open_tier(process.url), open_tier(process.url)
    pages = [make_page(number) for number in range(6)]
    process.client.config_resetstat()
    one.put(pages[:4])
    other.put(pages[3:])
    expected = sum(len(blob) for _, blob in pages)
    until(lambda: one.used_bytes == other.used_bytes == expected)
    assert "cmdstat_scan" not in process.client.info("commandstats")
    assert open_tier(process.url).used_bytes == expected, "a new worker reads the sum"


def put_and_die(url: str, namespace: str, layout: PageLayout, pages: list[Any]) -> None:
    """Change pages and be killed before the change of the sum is published."""
    RedisTier(url, layout, namespace=namespace).put(pages)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_sum_is_right_again_soon_after_a_worker_was_killed(
    layout: PageLayout,
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage, "_RECOUNT_SECONDS", 0.5)
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    process = redis_process()
    page = make_page(0)
    open_tier(process.url, namespace="shared").close()
    killed = get_context("spawn").Process(
        target=put_and_die, args=(process.url, "shared", layout, [page])
    )
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    successor = open_tier(process.url, namespace="shared")
    until(lambda: successor.used_bytes == len(page[1]), "the sum is right")


def test_a_count_sets_the_sum_for_all_workers(
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    process = redis_process()
    one, other = open_tier(process.url), open_tier(process.url)
    page = make_page(0)
    one.put([page])
    (name,) = process.client.scan_iter("*:used")
    process.client.set(name, 12345)
    assert other.count_used_bytes() == len(page[1])
    until(lambda: one.used_bytes == other.used_bytes, "both have the same sum")
    one.count_used_bytes()
    until(lambda: one.used_bytes == other.used_bytes == len(page[1]), "the sum is right")


def test_what_was_stored_while_a_count_ran_is_right_after_the_next_one(
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setattr(usage, "_RECOUNT_SECONDS", 0.3)
    process = redis_process()
    one, other = open_tier(process.url), open_tier(process.url)
    page = make_page(0)
    other.put([page])
    one._usage.count()
    other._usage.refresh()
    one._usage.refresh()
    assert one.used_bytes == 2 * len(page[1]), "counted, and published after"
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    one._usage._doubt()
    until(lambda: one.used_bytes == other.used_bytes == len(page[1]), "the sum is right")


def test_a_call_that_was_sent_again_makes_the_sum_doubtful(
    open_tier: OpenTier, redis_process: Any, until: Until
) -> None:
    tier = open_tier(redis_process().url)
    tier._usage._doubted_at = None
    broken = iter([True])

    def ping(client: Any) -> bool:
        client.ping()
        if next(broken, False):
            raise redis.ConnectionError("the reply was lost")
        return True

    assert tier._server.run_on_all(ping) == [True]
    until(lambda: tier._usage._doubted_at is not None, "the sum is in doubt")


def test_of_many_workers_that_start_at_once_one_counts_the_pages(
    open_tier: OpenTier, redis_process: Any, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_RECOUNT_SECONDS", 0.3)
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    process = redis_process()
    tiers = [open_tier(process.url) for _ in range(6)]
    process.client.config_resetstat()
    until(lambda: all(tier._usage._doubted_at is None for tier in tiers), "all are sure")
    assert process.client.info("commandstats")["cmdstat_scan"]["calls"] <= 2


def test_an_expired_page_leaves_the_sum_at_the_next_count(
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setattr(usage, "_COUNT_SECONDS", 0.3)
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.1)
    tier = open_tier(redis_process().url, ttl_seconds=0.4)
    tier.put([make_page(0)])
    assert tier.used_bytes > 0
    until(lambda: tier.used_bytes == 0)


def test_a_full_tier_is_counted_again_and_accepts_pages_once_others_expired(
    open_tier: OpenTier,
    make_page: MakePage,
    redis_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    until: Until,
) -> None:
    monkeypatch.setattr(usage, "_RECOUNT_SECONDS", 0.2)
    page = make_page(0, "later")
    tier = open_tier(redis_process().url, ttl_seconds=1, limit_bytes=len(page[1]))
    tier.put([make_page(0, "earlier")])
    with pytest.raises(TierFullError, match="raise its limit"):
        tier.put([page])

    def is_accepted() -> bool:
        try:
            tier.put([page])
        except TierFullError:
            return False
        return True

    until(is_accepted)


def test_a_silent_server_costs_one_timeout_and_then_nothing_until_it_answers(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any, until: Until
) -> None:
    process = redis_process()
    tier = open_tier(process.url)
    page = make_page(0)
    tier.put([page])
    process.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(TierFailedError):
            tier.get([page[0]])
        assert time.monotonic() - began < 8, "one timeout of 2 s, no second attempt"
        began = time.monotonic()
        for _ in range(50):
            with pytest.raises(TierFailedError):
                tier.get([page[0]])
            assert tier.used_bytes == len(page[1])
        assert time.monotonic() - began < 1
    finally:
        process.signal(signal.SIGCONT)

    def answers() -> bool:
        try:
            return tier.get([page[0]]) == [page[1]]
        except TierFailedError:
            return False

    until(answers)


def test_pages_take_seven_tenths_of_the_servers_memory_by_default(
    open_tier: OpenTier, redis_process: Any
) -> None:
    tier = open_tier(redis_process("maxmemory 40mb").url)
    assert tier.limit_bytes == int(0.7 * 40 * (1 << 20))
    assert open_tier(redis_process().url, namespace="unlimited").limit_bytes is None
    assert open_tier(redis_process("maxmemory 40mb").url, limit_bytes=7).limit_bytes == 7


def test_pages_are_refused_while_other_data_still_fits(
    open_tier: OpenTier, redis_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_PUBLISH_SECONDS", 0.05)
    process = redis_process("maxmemory 24mb", "maxmemory-policy noeviction")
    layout = PageLayout(2, 2, 64, torch.float32, "model A")
    tier = open_tier(process.url, layout)
    for number in range(14):
        process.client.set(f"catalog-{number}", bytes(1 << 20))
    tier._usage.refresh()
    rows = torch.zeros(layout.rows_shape(64))

    def fill() -> None:
        for number in range(400):
            page_id = make_id(number)
            tier.put([(page_id, encode_page(layout, page_id, rows, written_at=1))])
            time.sleep(0.005)

    with pytest.raises(TierFullError, match="do not fit"):
        fill()
    process.client.set("commit", bytes(1 << 16))


def test_deleted_pages_leave_the_sum_at_once_whoever_deletes_them_and_return_with_a_put(
    open_tier: OpenTier, make_page: MakePage, redis_process: Any, until: Until
) -> None:
    process = redis_process()
    one, other = open_tier(process.url), open_tier(process.url)
    pages = [make_page(number) for number in range(4)]
    one.put(pages)
    one.delete([page_id for page_id, _ in pages[:3]])
    assert one.used_bytes == len(pages[3][1])
    until(lambda: other.used_bytes == one.used_bytes, "both have the same sum")
    other.delete([page_id for page_id, _ in pages[:3]])
    assert other.used_bytes == len(pages[3][1])
    other.put(pages[:2])
    assert other.used_bytes == other.count_used_bytes() == 3 * len(pages[3][1])
