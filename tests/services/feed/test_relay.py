"""Notices between gateways by a real Redis: each gets the others', none its own, and it may be lost."""

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from kvrecall_server.app.redis import server_clients
from services.feed.notices import Notice
from services.feed.relay import RedisRelay

WAIT_SECONDS = 60


class Gateway:
    """A relay with what it received."""

    def __init__(self, url: str, channel: str) -> None:
        self.relay = RedisRelay(server_clients(url), channel)
        self.received: asyncio.Queue[Notice] = asyncio.Queue()
        self.relay.start(self.received.put_nowait)

    async def read(self) -> Notice:
        return await asyncio.wait_for(self.received.get(), WAIT_SECONDS)


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
async def gateways(request: pytest.FixtureRequest) -> AsyncIterator[list[Gateway]]:
    """Three gateways: two of one catalog, and one of another."""
    url = request.getfixturevalue(request.param)
    channel = uuid4().hex
    made = [Gateway(url, name) for name in (channel, channel, f"{channel} of others")]
    for gateway in made:
        await asyncio.wait_for(gateway.relay.listening.wait(), WAIT_SECONDS)
    yield made
    for gateway in made:
        await gateway.relay.stop()


def notice(number: int) -> Notice:
    return Notice("turn", "ann", f"s{number}", {"turn": number, "durable": True, "code": None})


async def test_a_gateway_gets_what_others_of_its_catalog_publish(gateways: list[Gateway]) -> None:
    one, two, stranger = gateways
    for number in range(50):
        one.relay.publish(notice(number))
    assert [await two.read() for _ in range(50)] == [notice(number) for number in range(50)]
    two.relay.publish(notice(99))
    assert await one.read() == notice(99)
    assert one.received.empty()
    assert stranger.received.empty()


async def test_a_relay_goes_on_after_its_connections_were_cut_and_skips_what_it_cannot_read(
    redis_url: str,
) -> None:
    channel = uuid4().hex
    one, two = Gateway(redis_url, channel), Gateway(redis_url, channel)
    redis = Redis.from_url(redis_url)
    try:
        for gateway in (one, two):
            await asyncio.wait_for(gateway.relay.listening.wait(), WAIT_SECONDS)
        await redis.publish(channel, b"\xff\xfe no notice")
        await redis.publish(channel, "someone [1, 2]")
        await redis.client_kill_filter(_type="pubsub")
        async with asyncio.timeout(WAIT_SECONDS):
            while two.received.empty():
                one.relay.publish(notice(1))
                await redis.ping()
        assert await two.read() == notice(1)
    finally:
        for gateway in (one, two):
            await gateway.relay.stop()
        await redis.aclose()


async def test_publishing_without_a_server_neither_waits_nor_fails() -> None:
    relay = RedisRelay(server_clients("redis://127.0.0.1:1/0"), "c")
    relay.start(lambda _: None)
    for number in range(5000):
        relay.publish(notice(number))
    await relay.stop()
