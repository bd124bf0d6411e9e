"""A transport that sends a response's head and the beginning of its body together.

The server writes them one after the other; each would be a system call of its own, and a packet that
wakes the client.
"""

import asyncio
from typing import Any

# What is more is not held back: the transport below tells when the client does not keep up.
_HELD_BYTES = 1 << 16


class GatheringTransport(asyncio.Transport):
    """Holds writes back until `flush`, which comes with the next pass of the event loop at latest."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._held: list[bytes | bytearray | memoryview] = []
        self._size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send the data with what else is written now."""
        if not data:
            return
        if not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held.append(data)
        self._size += len(data)
        if self._size > _HELD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what is held back."""
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._size = 0
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._held.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether the connection is closed, or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a fact about the connection."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Receive no more data for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Receive data again."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand the connection to another protocol."""
        self._transport.set_protocol(protocol)
