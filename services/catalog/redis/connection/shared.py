"""One connection to a Redis server that all tasks of a process share.

redis-py lends a connection to one caller at a time, which takes more of the event loop than Redis
takes for the command. Here a command is written at once if no other is on its way, else with all
others of the same pass of the event loop, and replies are handed out in the order of the commands.
redis-py still connects: to an address, by TLS, with a password, or to the primary that a sentinel
names.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

Argument = str | bytes | int | float
Command = tuple[Argument, ...]

_NOTHING = object()
# In replies of a server that is a replica now: the primary is found by connecting anew.
_DEMOTED = ("READONLY", "MASTERDOWN")


class SharedConnection:
    """A connection that is made when it is needed, and made anew after it was lost.

    A reply that takes more than `timeout_seconds` loses the connection. Commands that wait for
    something else than the server's own work (WAIT, BLPOP) would hold up all others.
    """

    def __init__(self, pool: ConnectionPool, timeout_seconds: float) -> None:
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._connecting: asyncio.Task[_Channel] | None = None
        self._channel: _Channel | None = None

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands in one round trip, in order, and return the replies as Redis sent them.

        Raises the first error among them, or redis-py's exception for a connection that failed.
        """
        channel = self._channel
        if channel is None or channel.closing:
            channel = await self._get_channel()
        replies: list[Any] = await channel.send(commands)
        for reply in replies:
            if isinstance(reply, Exception):
                if any(word in str(reply) for word in _DEMOTED):
                    channel.close()
                raise reply
        return replies

    def close(self) -> None:
        """Close the connection with its last reply."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._channel is not None:
            self._channel.close()

    async def _get_channel(self) -> "_Channel":
        """Connect, or wait for the attempt that is being made: its failure is everybody's."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="connect to Redis")
            self._connecting.add_done_callback(self._end_attempt)
        try:
            return await asyncio.shield(self._connecting)
        except RedisError as error:  # an error of its own for each task, as a traceback grows
            raise type(error)(*error.args) from error

    async def _connect(self) -> "_Channel":
        connection = self._pool.make_connection()
        await connection.connect()
        self._channel = _Channel(connection, self._timeout_seconds)
        return self._channel

    def _end_attempt(self, attempt: "asyncio.Task[_Channel]") -> None:
        self._connecting = None
        if not attempt.cancelled():
            attempt.exception()  # raised to those who wait, if anyone still does


@dataclass(frozen=True)
class _Exchange:
    """Commands that were sent: the number of replies, those received, and when they are late."""

    count: int
    deadline: float
    result: "asyncio.Future[list[Any]]"
    replies: list[Any] = field(default_factory=list)


class _Channel(asyncio.Protocol):
    """A connection of redis-py's, taken over once it is set up."""

    def __init__(self, connection: AbstractConnection, timeout_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_seconds = timeout_seconds
        self._reader = hiredis.Reader(replyError=ResponseError, notEnoughData=_NOTHING)
        self._unsent: list[bytes] = []
        self._waiting: deque[_Exchange] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.closing = False
        assert connection._writer is not None, "it is connected"
        self._connection = connection  # closes its transport when it is collected
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)

    def send(self, commands: Sequence[Command]) -> "asyncio.Future[list[Any]]":
        """Send commands, with all others of this pass of the event loop if any are on their way.

        Raises ConnectionError when the connection is lost already.
        """
        if self.closing:
            raise ConnectionError("the connection was lost before a command was sent")
        alone = not self._waiting
        if not alone and not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += [hiredis.pack_command(command) for command in commands]  # type: ignore[arg-type]
        deadline = self._loop.time() + self._timeout_seconds
        exchange = _Exchange(len(commands), deadline, self._loop.create_future())
        self._waiting.append(exchange)
        if alone:  # others that come in this pass follow together
            self._flush()
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._check_deadline)
        return exchange.result

    def close(self) -> None:
        """Close the connection once all replies have come."""
        self.closing = True
        if not self._waiting:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Hand out the replies that are complete."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOTHING:
                self._add(reply)
        except (hiredis.ProtocolError, IndexError) as error:
            self._fail(ConnectionError(f"Redis sent no reply to a command: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what was not answered."""
        self._fail(ConnectionError(f"the connection was lost: {error or 'the server closed it'}"))
        self._connection._close()

    def _add(self, reply: Any) -> None:
        exchange = self._waiting[0]
        exchange.replies.append(reply)
        if len(exchange.replies) < exchange.count:
            return
        self._waiting.popleft()
        if not exchange.result.done():  # else its task was cancelled
            exchange.result.set_result(exchange.replies)
        if self.closing and not self._waiting:
            self._transport.close()

    def _flush(self) -> None:
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        deadline = self._waiting[0].deadline
        if deadline > self._loop.time():
            self._timer = self._loop.call_at(deadline, self._check_deadline)
        else:
            self._fail(TimeoutError(f"no reply within {self._timeout_seconds:g} s"))

    def _fail(self, error: Exception) -> None:
        """Give the connection up; each task gets an error of its own."""
        self.closing = True
        self._unsent.clear()
        self._transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, deque()
        for exchange in waiting:
            if not exchange.result.done():
                exchange.result.set_exception(type(error)(*error.args))
