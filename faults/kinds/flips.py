"""Bit flips in stored data: headers and payloads of segment files, and pages in Redis."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import redis

from kvstore.errors import PageError
from kvstore.format.page import HEADER_BYTES, MAGIC, RecordKind, parse_header

Part = Literal["header", "payload"]
_PAGE_KEY = re.compile(rb":p:[0-9a-f]{32}$")
# SETRANGE has no XX option: a page that was deleted meanwhile must not be created again as one
# byte.
_SET_IF_EXISTS = """
if redis.call('exists', KEYS[1]) == 1 then
  redis.call('setrange', KEYS[1], ARGV[1], ARGV[2])
end
"""


@dataclass(frozen=True)
class Flip:
    """A flipped bit: the file name or Redis key, the byte offset, and the bit's number."""

    target: str
    offset: int
    bit: int


@dataclass(frozen=True)
class _Record:
    offset: int
    size: int


def flip_in_files(folder: Path, part: Part, rng: Random) -> Flip | None:
    """Flip one bit of a page's payload, or of any record's header, in a segment of `folder`.

    None if there is no such record.
    """
    found = [
        (path, record)
        for path in sorted(folder.glob("segment-*.kv"))
        for record in _records(path, part)
    ]
    if not found:
        return None
    path, record = rng.choice(found)
    within = (
        rng.randrange(HEADER_BYTES)
        if part == "header"
        else rng.randrange(HEADER_BYTES, record.size)
    )
    flip = Flip(path.name, record.offset + within, rng.randrange(8))
    with suppress(FileNotFoundError):
        flip_bit(path, flip.offset, flip.bit)
    return flip


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file. Raises FileNotFoundError."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        if old:
            file.seek(offset)
            file.write(bytes([old[0] ^ 1 << bit]))


def flip_in_redis(client: "redis.Redis", rng: Random) -> Flip | None:
    """Flip one bit of a page in Redis; None if it has no pages."""
    names = sorted(page_names(client))
    if not names:
        return None
    name = rng.choice(names)
    offset = rng.randrange(max(1, int(client.strlen(name))))
    bit = rng.randrange(8)
    old = client.getrange(name, offset, offset)
    if old:
        client.eval(_SET_IF_EXISTS, 1, name, offset, bytes([ord(old) ^ 1 << bit]))
    return Flip(name.decode(), offset, bit)


def page_names(client: "redis.Redis") -> list[bytes]:
    """Keys of all pages in Redis."""
    return [name for name in client.scan_iter(count=1000) if _PAGE_KEY.search(name)]


def _records(path: Path, part: Part) -> list[_Record]:
    """Readable records of a file that can be hit; none if the file is gone."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found = []
    offset = 0
    while 0 <= offset < len(data):
        try:
            header = parse_header(data, offset)
        except PageError:
            offset = data.find(MAGIC, offset + 1)
            continue
        if part == "header" or header.kind is RecordKind.PAGE:
            found.append(_Record(offset, header.record_bytes))
        offset += header.record_bytes
    return found
