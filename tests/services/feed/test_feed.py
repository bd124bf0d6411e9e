"""The feed: each reader gets its tenant's notices, a slow one is dropped, others miss nothing."""

from typing import Any

import pytest

from kvrecall.domain.errors import Overloaded, ShuttingDown
from kvrecall.domain.events import SessionDeleted
from kvrecall.domain.limits import ServiceLimits
from services.feed.notices import Notice


@pytest.fixture
def settings() -> ServiceLimits:
    return ServiceLimits(queue_seconds=5, drain_seconds=5, max_streams=3)


async def test_a_reader_that_reads_nothing_is_dropped_and_others_miss_nothing(
    harness: Any,
) -> None:
    feed = harness.service.feed
    slow, quick = feed.subscribe(""), feed.subscribe("")
    for number in range(300):
        feed.observe(SessionDeleted(f"s{number}"))
        assert (await anext(quick)).session == f"s{number}"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    for subscription in (slow, quick):
        await subscription.aclose()
    assert not feed.subscriptions


async def test_a_snapshot_comes_before_what_happened_while_it_was_read(harness: Any) -> None:
    feed = harness.service.feed
    subscription = feed.subscribe("")
    feed.observe(SessionDeleted("s1"))
    subscription.begin(Notice("snapshot", "", "", {}))
    assert [(await anext(subscription)).name for _ in range(2)] == ["snapshot", "deleted"]


async def test_a_reader_gets_its_own_tenants_notices_of_its_session(harness: Any) -> None:
    feed = harness.service.feed
    every, one = feed.subscribe("ann"), feed.subscribe("ann", "s2")
    for session, tenant in (("s1", "ann"), ("s2", "ben"), ("s2", "ann"), ("s3", "")):
        feed.observe(SessionDeleted(session, tenant))
    assert [(await anext(every)).session for _ in range(2)] == ["s1", "s2"]
    assert (await anext(one)).session == "s2"
    with pytest.raises(StopAsyncIteration):  # a deleted session has no more
        await anext(one)


async def test_so_many_streams_and_no_more(harness: Any) -> None:
    feed = harness.service.feed
    open_ones = [feed.subscribe("") for _ in range(3)]
    with pytest.raises(Overloaded, match="3 streams"):
        feed.subscribe("ann")
    await open_ones[0].aclose()
    feed.subscribe("ann")
    feed.end()
    with pytest.raises(ShuttingDown):
        feed.subscribe("")


class TestShares:
    @pytest.fixture
    def settings(self) -> ServiceLimits:
        return ServiceLimits(drain_seconds=5, max_streams=64)

    async def test_one_tenant_cannot_hold_all_streams(self, harness: Any) -> None:
        feed = harness.service.feed
        for _ in range(48):
            feed.subscribe("ann")
        with pytest.raises(Overloaded, match="48 streams"):
            feed.subscribe("ann")
        feed.subscribe("bob")


async def test_an_unknown_session_leaves_no_subscription(harness: Any) -> None:
    with pytest.raises(Exception, match="there is no session"):
        await harness.service.watching.watch_session("s_none", "")
    assert not harness.service.feed.subscriptions
