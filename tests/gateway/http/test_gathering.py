"""Writes that leave together: in order, soon, and not more than is good for the memory."""

import asyncio
from typing import Any

import pytest

from gateway.http.gathering import GatheringTransport


class Recorder(asyncio.Transport):
    """A transport that notes the pieces that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []
        self.calls: list[str] = []

    def write(self, data: Any) -> None:
        """Note a piece."""
        self.pieces.append(bytes(data))

    def close(self) -> None:
        """Note the call."""
        self.calls.append("close")

    def abort(self) -> None:
        """Note the call."""
        self.calls.append("abort")


@pytest.fixture
def below() -> Recorder:
    return Recorder()


async def test_the_writes_of_one_pass_leave_in_one_piece_with_the_next(below: Recorder) -> None:
    transport = GatheringTransport(below)
    for data in (b"head", b"", bytearray(b"body")):
        transport.write(data)
    assert below.pieces == []
    await asyncio.sleep(0)
    transport.write(b"more")
    await asyncio.sleep(0)
    assert below.pieces == [b"headbody", b"more"]


async def test_what_is_flushed_leaves_at_once_and_only_once(below: Recorder) -> None:
    transport = GatheringTransport(below)
    transport.write(b"head")
    transport.write(b"body")
    transport.flush()
    assert below.pieces == [b"headbody"]
    await asyncio.sleep(0)
    assert below.pieces == [b"headbody"]


async def test_large_writes_are_not_held_back(below: Recorder) -> None:
    transport = GatheringTransport(below)
    transport.write(b"head")
    transport.write(b"x" * (1 << 17))
    assert [len(piece) for piece in below.pieces] == [4 + (1 << 17)]


async def test_closing_sends_what_is_held_back_and_aborting_does_not(below: Recorder) -> None:
    transport = GatheringTransport(below)
    transport.write(b"bye")
    transport.close()
    transport.write(b"late")
    transport.abort()
    await asyncio.sleep(0)
    assert below.pieces == [b"bye"]
    assert below.calls == ["close", "abort"]
