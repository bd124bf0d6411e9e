"""A TCP proxy on loopback whose connections can be cut, delayed, refused, stalled, or parted."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

Way = Literal["requests", "answers"]
WAYS: tuple[Way, ...] = ("requests", "answers")
_CHUNK_BYTES = 1 << 16
# SO_LINGER: a close sends a reset, as a broken network does.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to `port` on to the port `target`, on a thread of its own."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._delay = 0.0
        self._refusing = False
        self._find_parted: Callable[[], frozenset[int]] = frozenset
        self._parted: frozenset[int] = frozenset()
        self._parted_ways: tuple[Way, ...] = ()
        self._mark = b""
        self.marked = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._together = asyncio.Event()
        self._flowing = {way: asyncio.Event() for way in WAYS}
        for flowing in self._flowing.values():
            flowing.set()
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target}", daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break every open connection; new ones are accepted."""
        self._call(self._break_all)

    def refuse(self) -> None:
        """Break every open connection and every new one, until `heal`."""
        self._refusing = True
        self.cut()

    def stall(self, *ways: Way) -> None:
        """Forward no data, though connections stay open, until `heal`; `ways`: both by default."""
        for way in ways or WAYS:
            self._call(self._flowing[way].clear)

    def stall_at(self, mark: bytes) -> None:
        """Stall requests from the first data with these bytes on, until `heal`; sets `marked`."""
        self.marked.clear()
        self._mark = mark

    def part(self, find_ports: Callable[[], frozenset[int]], *ways: Way) -> None:
        """Forward no data of the peers at these ports, until `heal`; `ways`: both by default."""

        def begin() -> None:
            self._find_parted = find_ports
            self._parted = find_ports()
            self._parted_ways = ways or WAYS
            self._together.clear()

        self._call(begin)

    def delay(self, seconds: float) -> None:
        """Delay every chunk of data by `seconds`, until `heal`."""
        self._delay = seconds

    def heal(self) -> None:
        """Forward data without faults again."""
        self._delay = 0.0
        self._refusing = False
        self._mark = b""
        self._parted_ways = ()
        for flowing in (*self._flowing.values(), self._together):
            self._call(flowing.set)

    def close(self) -> None:
        """Break every connection and stop listening."""
        self._call(self._loop.stop)
        self._thread.join()

    def _call(self, function: Callable[[], object]) -> None:
        """Run a function on the proxy's thread and wait for its end."""
        done = threading.Event()

        def run() -> None:
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, sock=self._listener)
        )
        self._loop.run_forever()
        server.close()
        self._break_all()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def _break_all(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server runs it as a task"
        self._connections.add(task)
        if self._parted_ways:
            self._parted = self._find_parted()
        with suppress(OSError, asyncio.CancelledError):
            if self._refusing:
                _reset(writer)
            else:
                await self._forward(reader, writer)
        writer.close()
        self._connections.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward both directions until one ends; cancellation resets both."""
        peer: int = writer.get_extra_info("peername")[1]
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            both = (
                self._pump(reader, target_writer, "requests", peer),
                self._pump(target_reader, writer, "answers", peer),
            )
            pumps = [asyncio.ensure_future(pump) for pump in both]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
        except asyncio.CancelledError:
            _reset(writer)
            _reset(target_writer)
            raise
        finally:
            target_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way, peer: int
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await asyncio.sleep(self._delay)
                if self._mark and way == "requests" and self._mark in data:
                    self._flowing[way].clear()
                    self.marked.set()
                await self._flowing[way].wait()
                if way in self._parted_ways and peer in self._parted:
                    await self._together.wait()
                writer.write(data)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset, so that the other side fails at once."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
