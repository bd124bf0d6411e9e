"""Notices between the gateways of one catalog, by publish and subscribe in its Redis; best effort.

What is published while Redis cannot be reached is lost. Readers get a snapshot when they connect, so
they miss a change, not its effect.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol
from uuid import uuid4

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvrecall.telemetry.outage import Outage
from services.feed.notices import Notice

_log = structlog.get_logger(__name__)
_FAILURES = (RedisError, OSError)
_UNSENT = 1024
_PAUSE_SECONDS = 1.0
_POLL_SECONDS = 1.0
_CANCEL_SECONDS = 0.1


class Relay(Protocol):
    """The way between gateways."""

    def start(self, receive: Callable[[Notice], None]) -> None:
        """Call `receive` with what other gateways publish, from now on."""
        ...

    def publish(self, notice: Notice) -> None:
        """Send a notice to the other gateways, some time. Does not wait and does not fail."""
        ...

    async def stop(self) -> None:
        """Send and receive nothing more."""
        ...


class RedisRelay:
    """A relay over a channel of Redis.

    `connect` makes a client of a server; another one is made after a failure.
    """

    def __init__(self, connect: Callable[[], Redis], channel: str) -> None:
        self._connect = connect
        self._channel = channel
        self._origin = uuid4().hex
        self._unsent: asyncio.Queue[Notice] = asyncio.Queue(_UNSENT)
        self._tasks: list[asyncio.Task[None]] = []
        self._outage = Outage(
            _log, "events of other gateways not available", "events of other gateways again"
        )
        self.listening = asyncio.Event()

    def start(self, receive: Callable[[Notice], None]) -> None:
        """Start listening and sending."""
        self._tasks = [
            asyncio.create_task(self._keep(lambda redis: self._listen(redis, receive))),
            asyncio.create_task(self._keep(self._send)),
        ]

    def publish(self, notice: Notice) -> None:
        """Queue a notice; it is dropped when too many wait."""
        with suppress(asyncio.QueueFull):
            self._unsent.put_nowait(notice)

    async def stop(self) -> None:
        """Cancel both tasks and wait for their ends."""
        running = set(self._tasks)
        while running:
            for task in running:
                task.cancel()
            # redis-py drops a cancellation that comes together with a reply: it is repeated.
            _, running = await asyncio.wait(running, timeout=_CANCEL_SECONDS)

    async def _keep(self, work: Callable[[Redis], Coroutine[Any, Any, None]]) -> None:
        """Run work on a connection, and on another one after each failure."""
        while True:
            redis = self._connect()
            try:
                await work(redis)
            except _FAILURES as error:
                self.listening.clear()
                self._outage.note(str(error))
            finally:
                with suppress(*_FAILURES):
                    await redis.aclose()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _listen(self, redis: Redis, receive: Callable[[Notice], None]) -> None:
        async with redis.pubsub(ignore_subscribe_messages=False) as channel:
            await channel.subscribe(self._channel)
            while True:
                message = await channel.get_message(timeout=_POLL_SECONDS)
                if message is None:
                    continue
                if message["type"] == "subscribe":
                    self._outage.end()
                    self.listening.set()
                elif message["type"] == "message":
                    self._receive(message["data"], receive)

    def _receive(self, data: bytes, receive: Callable[[Notice], None]) -> None:
        """Decode a message of another gateway; others, and those that are no notices, are skipped."""
        with suppress(ValueError):
            origin, _, text = data.decode().partition(" ")
            if origin != self._origin:
                receive(Notice.decode(text))

    async def _send(self, redis: Redis) -> None:
        while True:
            notice = await self._unsent.get()
            await redis.publish(self._channel, f"{self._origin} {notice.encode()}")
