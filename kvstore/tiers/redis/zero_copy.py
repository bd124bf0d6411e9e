"""Large values to and from Redis without copies: redis-py's connections, with their payloads past its buffers.

redis-py joins a command's parts and cuts replies out of a growing buffer; for pages of megabytes each of these copies,
into new memory, takes as long as the network. Here payloads are sent from where they lie and received where they stay.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

Command = tuple[str | bytes | memoryview | int | float, ...]

_LARGE_BYTES = 1 << 14
_LINE_BYTES = 1 << 12


def batched(client: Redis, commands: Iterable[Command]) -> list[Any]:
    """Commands in one round trip, in order, on one connection: replies as the server sends them.

    Raises the first error among them.
    """
    commands = list(commands)
    with _connection(client) as connection:
        connection.send_packed_command(_packed(commands))
        replies = [_reply(connection) for _ in commands]
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def large_values(
    client: Redis, names: Sequence[str], lend: Callable[[int], memoryview], at_once: int
) -> list[memoryview | None]:
    """What `MGET` returns, received into memory that `lend` gives for so many bytes.

    Asks for `at_once` values with each command, and for the next ones while the last are on their way.
    """
    commands: list[Command] = [
        ("MGET", *names[i : i + at_once]) for i in range(0, len(names), at_once)
    ]
    values: list[memoryview | None] = []
    with _connection(client) as connection:
        connection.send_packed_command(_packed(commands[:1]))
        # redis-py reads nothing ahead: all that comes now are the replies.
        replies = _Replies(connection._get_socket())
        for coming in (*commands[1:], None):
            if coming is not None:
                connection.send_packed_command(_packed([coming]))
            line = replies.line()
            if line.startswith(b"-"):
                raise connection._parser.parse_error(line[1:].decode(errors="replace"))
            values += [replies.value(lend) for _ in range(replies.count(line, b"*"))]
    return values


class _Replies:
    """Reads a reply from a socket; a line at a time, but values in one go."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._ahead = b""

    def line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            if not (more := self._socket.recv(_LINE_BYTES)):
                raise ConnectionError("the server closed the connection")
            self._ahead += more
        line = self._ahead[:end]
        self._ahead = self._ahead[end + 2 :]
        return line

    def count(self, line: bytes, kind: bytes) -> int:
        if not line.startswith(kind):
            raise InvalidResponse(f"expected a reply that starts with {kind!r}, got {line[:20]!r}")
        return int(line[1:])

    def value(self, lend: Callable[[int], memoryview]) -> memoryview | None:
        size = self.count(self.line(), b"$")
        if size < 0:
            return None
        value = lend(size)
        known = min(size, len(self._ahead))
        value[:known], self._ahead = self._ahead[:known], self._ahead[known:]
        rest = value[known:]
        while rest:
            if not (read := self._socket.recv_into(rest)):
                raise ConnectionError("the server closed the connection")
            rest = rest[read:]
        if self.line():
            raise InvalidResponse("a value is longer than the server said")
        return value


@contextmanager
def _connection(client: Redis) -> Iterator[Any]:
    """A connection of the client's pool. If anything goes wrong it is closed: its replies may still be on their way."""
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _packed(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Commands as they are sent, large parts by themselves."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes] = []
    for command in commands:
        small.append(b"*%d\r\n" % len(command))
        for part in command:
            data = part if isinstance(part, (bytes, memoryview)) else str(part).encode()
            small.append(b"$%d\r\n" % len(data))
            if len(data) < _LARGE_BYTES:
                small.append(bytes(data))
            else:
                pieces += [b"".join(small), data]
                small = []
            small.append(b"\r\n")
    pieces.append(b"".join(small))
    return pieces
