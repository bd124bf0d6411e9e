"""A session as one file: records behind a magic number and a version, and a checksum over all of it at the end.

A record is its kind (1 byte), the lengths of its two parts (4 and 8 bytes, little-endian), a JSON value and bytes.
The first record is the header, the last one has the checksum (BLAKE2b, 32 bytes) of everything before it. Nothing
follows it. A file is written under another name and renamed when it is whole and on the disk.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from kvrecall.app.errors import BadSessionFile

MAGIC = b"kvrecall session"
VERSION = 1

_VERSION = struct.Struct("<H")
_HEAD = struct.Struct("<BIQ")
_DIGEST_BYTES = 32


class RecordKind(IntEnum):
    """What a record holds."""

    HEADER = 1
    SESSION = 2
    STATE = 3
    TURN = 4
    CALL = 5
    REPAIR = 6
    EPISODES = 7
    EPISODE = 8
    SEGMENT = 9
    PAGE = 10
    END = 255


@dataclass(frozen=True)
class Record:
    """A JSON value and bytes that belong to it."""

    kind: RecordKind
    value: Any = None
    data: bytes = b""


class SessionWriter:
    """Appends records to a file, and its checksum at the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = blake2b(digest_size=_DIGEST_BYTES)
        self._write(MAGIC + _VERSION.pack(VERSION))

    def add(self, record: Record) -> None:
        """Append a record."""
        value = json.dumps(record.value, separators=(",", ":")).encode()
        self._write(_HEAD.pack(record.kind, len(value), len(record.data)) + value)
        self._write(record.data)

    def end(self) -> None:
        """Append the checksum: the file is whole."""
        self.add(Record(RecordKind.END, data=self._digest.digest()))

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


@contextmanager
def writing(path: Path) -> Iterator[SessionWriter]:
    """Write a file that is there only if all went well. Raises BadSessionFile when it cannot be written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            writer = SessionWriter(file)
            yield writer
            writer.end()
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise BadSessionFile(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def reading(path: Path) -> Iterator[Record]:
    """The records but for the last, one at a time.

    Raises BadSessionFile at the first that cannot be read, and at the end when the checksum does not hold: only what
    was read to its end is what was written.
    """
    try:
        with path.open("rb") as file:
            yield from _records(path, file, path.stat().st_size)
    except OSError as error:
        raise BadSessionFile(f"{path} cannot be read: {error.strerror or error}") from error


def _records(path: Path, file: BinaryIO, size: int) -> Iterator[Record]:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    begin = file.read(len(MAGIC) + _VERSION.size)
    if not begin.startswith(MAGIC) or len(begin) < len(MAGIC) + _VERSION.size:
        raise BadSessionFile(f"{path} is no exported session: it does not begin as one")
    (version,) = _VERSION.unpack_from(begin, len(MAGIC))
    if version != VERSION:
        raise BadSessionFile(f"{path} has version {version}, this kvrecall reads version {VERSION}")
    digest.update(begin)
    while True:
        expected = digest.digest()
        record, raw = _record(path, file, size)
        if record.kind is RecordKind.END:
            if record.data != expected or file.read(1):
                raise BadSessionFile(f"{path} is damaged: its checksum does not hold")
            return
        digest.update(raw)
        digest.update(record.data)
        yield record


def _record(path: Path, file: BinaryIO, size: int) -> tuple[Record, bytes]:
    """The next record, and its bytes but for its data."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise BadSessionFile(f"{path} is cut off after {file.tell()} bytes")
    kind, value_bytes, data_bytes = _HEAD.unpack(head)
    # Lengths are looked at before memory is asked for: a damaged one may say anything.
    if file.tell() + value_bytes + data_bytes > size:
        raise BadSessionFile(
            f"{path} is damaged or cut off: a record goes on beyond its {size} bytes"
        )
    value = file.read(value_bytes)
    data = file.read(data_bytes)
    try:
        return Record(RecordKind(kind), json.loads(value), data), head + value
    except (ValueError, RecursionError) as error:
        raise BadSessionFile(f"{path} is damaged: a record cannot be read ({error})") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
