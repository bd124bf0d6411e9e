"""Zero-copy transfer of large values over redis-py's connections, bypassing its buffers.

redis-py joins the parts of a command and slices replies out of a growing buffer. For pages of
megabytes each of these copies into new memory takes as long as the network. Here payloads are sent
in place and received into their final memory.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

Command = tuple[str | bytes | memoryview | int | float, ...]

_LARGE_BYTES = 1 << 14
_LINE_BYTES = 1 << 12


def run_batch(client: Redis, commands: Iterable[Command]) -> list[Any]:
    """Send commands in one round trip on one connection; return the raw replies in order.

    Raises the first error among the replies.
    """
    with borrow(client) as connection:
        replies = exchange(connection, commands)
    return require(replies)


def exchange(connection: Any, commands: Iterable[Command]) -> list[Any]:
    """Send commands in one round trip over a connection of `borrow`; returns replies and errors."""
    commands = list(commands)
    connection.send_packed_command(_pack(commands))
    return [_read_reply(connection) for _ in commands]


def require(replies: list[Any]) -> list[Any]:
    """Return replies. Raises the first error among them."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


def get_large_values(
    client: Redis, names: Sequence[str], allocate: Callable[[int], memoryview], batch: int
) -> list[memoryview | None]:
    """Get values by name, receiving each into memory from `allocate(bytes)`; None for no value.

    Requests `batch` values at a time, and the next batch before the previous one is received.
    """
    batches = [names[i : i + batch] for i in range(0, len(names), batch)]
    values: list[memoryview | None] = []
    with borrow(client) as connection:
        connection.send_packed_command(_pack_gets(batches[:1]))
        # redis-py reads nothing ahead, so the socket has these replies only.
        replies = _Replies(connection._get_socket())
        for requested, following in zip_longest(batches, batches[1:]):
            if following is not None:
                connection.send_packed_command(_pack_gets([following]))
            for _ in requested:
                line = replies.read_line()
                if line.startswith(b"-"):
                    raise connection._parser.parse_error(line[1:].decode(errors="replace"))
                values.append(replies.read_value(_parse_count(line, b"$"), allocate))
    return values


def _pack_gets(batches: Sequence[Sequence[str]]) -> list[bytes | memoryview]:
    return _pack([("GET", name) for batch in batches for name in batch])


class _Replies:
    """Reads replies from a socket: lines through a buffer, values into their own memory."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._ahead = b""

    def read_line(self) -> bytes:
        """Read a line without its end. Raises ConnectionError when the connection is closed."""
        while (end := self._ahead.find(b"\r\n")) < 0:
            if not (more := self._socket.recv(_LINE_BYTES)):
                raise ConnectionError("the server closed the connection")
            self._ahead += more
        line = self._ahead[:end]
        self._ahead = self._ahead[end + 2 :]
        return line

    def read_value(self, size: int, allocate: Callable[[int], memoryview]) -> memoryview | None:
        """Read a bulk string into memory from `allocate`; None for a null reply, of size -1."""
        if size < 0:
            return None
        value = allocate(size)
        buffered = min(size, len(self._ahead))
        value[:buffered] = self._ahead[:buffered]
        self._ahead = self._ahead[buffered:]
        remaining = value[buffered:]
        while remaining:
            if not (read := self._socket.recv_into(remaining)):
                raise ConnectionError("the server closed the connection")
            remaining = remaining[read:]
        if self.read_line():
            raise InvalidResponse(f"a value is longer than the {size} bytes that it was sent with")
        return value


def _parse_count(line: bytes, kind: bytes) -> int:
    if not line.startswith(kind):
        raise InvalidResponse(f"expected a reply that starts with {kind!r}, got {line[:20]!r}")
    return int(line[1:])


@contextmanager
def borrow(client: Redis) -> Iterator[Any]:
    """Take a connection from the client's pool; an error closes it, as replies may be pending."""
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        yield connection
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _read_reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _pack(commands: Sequence[Command]) -> list[bytes | memoryview]:
    """Encode commands for sending; large parts stay separate pieces without a copy."""
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
