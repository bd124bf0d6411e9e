"""The file format of a session archive.

A file begins with a magic number and a format version (2 bytes, little-endian); records follow. A
record is its kind (1 byte), the lengths of its two parts (4 and 8 bytes, little-endian), a JSON
value and bytes. The first record is the header, the last one has the checksum (BLAKE2b, 32 bytes)
of everything before it, and nothing follows it. Before that may be a signature of everything before
it, with the name of its key. A file is written under a temporary name and
renamed once it is whole and on the disk.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.admin.archive.signing import ArchiveKey
from kvrecall_server.app.errors import BadSessionFile

MAGIC = b"kvrecall session"

# The format version that this program writes and reads.
VERSION = 5

_VERSION = struct.Struct("<H")
_HEAD = struct.Struct("<BIQ")
_DIGEST_BYTES = 32


class ArchiveWriter:
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

    def end(self, key: ArchiveKey | None = None) -> None:
        """Append the signature, with a key, and the checksum, which completes the file."""
        if key is not None:
            signature = key.sign(self._digest.digest())
            self.add(Record(RecordKind.SIGNATURE, key.name, signature))
        self.add(Record(RecordKind.END, data=self._digest.digest()))

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


@contextmanager
def write_archive(path: Path, key: ArchiveKey | None = None) -> Iterator[ArchiveWriter]:
    """Write a file that appears only if the body succeeds; with a key it is signed.

    Raises BadSessionFile when it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            writer = ArchiveWriter(file)
            yield writer
            writer.end(key)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise BadSessionFile(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def read_records(path: Path, key: ArchiveKey | None = None) -> Iterator[Record]:
    """Read the records, one at a time, without the last.

    The data of a signature are the name of `key` if that has signed the file, else empty.

    Raises BadSessionFile at the first record that cannot be read, and at the end when the checksum
    does not match: only a file that was read to its end is known to be intact.
    """
    try:
        with path.open("rb") as file:
            _require_version(path, file)
            yield from _read_records(path, file, key)
    except OSError as error:
        raise BadSessionFile(f"{path} cannot be read: {error.strerror or error}") from error


def _require_version(path: Path, file: BinaryIO) -> None:
    start = file.read(len(MAGIC) + _VERSION.size)
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + _VERSION.size:
        raise BadSessionFile(
            f"{path} is no session archive: it does not begin as one; "
            "give a file that `kvrecall export` has written"
        )
    version = int(_VERSION.unpack_from(start, len(MAGIC))[0])
    if version != VERSION:
        raise BadSessionFile(
            f"{path} has format version {version}; this kvrecall reads version {VERSION}. "
            "Import it with the kvrecall that wrote it"
        )


def _read_records(path: Path, file: BinaryIO, key: ArchiveKey | None) -> Iterator[Record]:
    """Read the records as they are stored, a signature as it was verified."""
    size = path.stat().st_size
    signed = False
    file.seek(0)
    digest = blake2b(file.read(len(MAGIC) + _VERSION.size), digest_size=_DIGEST_BYTES)
    while True:
        expected = digest.digest()
        record, raw = _read_record(path, file, size)
        if record.kind is RecordKind.END:
            if record.data != expected or file.read(1):
                raise BadSessionFile(f"{path} is damaged: its checksum does not match")
            return
        if signed:
            raise BadSessionFile(f"{path} is damaged: records follow its signature")
        digest.update(raw)
        digest.update(record.data)
        if signed := record.kind is RecordKind.SIGNATURE:
            record = _verify(path, record, expected, key)
        yield record


def _verify(path: Path, record: Record, digest: bytes, key: ArchiveKey | None) -> Record:
    """Return a signature with the name of the key as its data if it is `key`'s, else without data."""
    if key is None or record.value != key.name:
        return replace(record, data=b"")
    if not key.verify(digest, record.data):
        raise BadSessionFile(
            f"{path} was changed after this installation signed it: its signature does not match; "
            "export the session again"
        )
    return replace(record, data=key.name.encode())


def _read_record(path: Path, file: BinaryIO, size: int) -> tuple[Record, bytes]:
    """Return the next record, and its bytes without its data."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise BadSessionFile(f"{path} is truncated after {file.tell()} bytes")
    kind, value_bytes, data_bytes = _HEAD.unpack(head)
    # Lengths are checked before memory is allocated: a damaged one may be any number.
    if file.tell() + value_bytes + data_bytes > size:
        raise BadSessionFile(
            f"{path} is damaged or truncated: a record extends beyond its {size} bytes"
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
