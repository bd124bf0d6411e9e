"""Subjects of the benchmark of tiers: memory, raw files, a plain socket; tiers and row stores."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
import torch

from faults.rig.redis_process import RedisProcess, running
from kvrecall.domain.page_ids import make_random_id
from kvstore.format.codec import decode_page, encode_page
from kvstore.format.page import HEADER_BYTES, ID_BYTES, PageId, PageLayout, parse_header
from kvstore.store import RowStore
from kvstore.tiers.base import Tier
from kvstore.tiers.nvme.tier import SEGMENT_BYTES
from kvstore.tiers.redis.tier import BATCH_BYTES

SESSION = "benchmark"
BATCH_PAGES = 16
BLOCK_TOKENS = 256
GATHER_TOKENS = 1024


def nothing() -> None:
    """Do nothing: the default preparation of a run."""


@dataclass(frozen=True)
class Subject:
    """A subject of a comparison; `before` prepares a run and is not timed."""

    name: str
    run: Callable[[], None]
    before: Callable[[], None] = nothing


class Pages:
    """About `wanted_bytes` of pages in one shape: random rows, their pages, and copy buffers."""

    def __init__(self, layout: PageLayout, wanted_bytes: int, seed: int) -> None:
        self.layout = layout
        self.count = max(BATCH_PAGES, wanted_bytes // layout.page_bytes)
        generator = torch.Generator().manual_seed(seed)
        self.rows = [
            torch.randn(layout.rows_shape(layout.page_tokens), generator=generator).to(layout.dtype)
            for _ in range(self.count)
        ]
        self.ids = [index.to_bytes(ID_BYTES, "little") for index in range(self.count)]
        self.blobs = [
            encode_page(layout, page_id, rows, written_at=int(time.time()))
            for page_id, rows in zip(self.ids, self.rows, strict=True)
        ]
        self.copy = np.zeros((self.count, layout.page_bytes), dtype=np.uint8)
        per_block = BLOCK_TOKENS // layout.page_tokens
        self.blocks = [
            torch.cat(self.rows[i : i + per_block], 3) for i in range(0, self.count, per_block)
        ]

    @property
    def bytes(self) -> int:
        """Bytes of all pages, headers included."""
        return self.count * self.layout.page_bytes

    def batches(self, size: int) -> Iterator[range]:
        """Indices of the pages in ranges of at most `size`."""
        for first in range(0, self.count, size):
            yield range(first, min(first + size, self.count))


class Memory:
    """The limit of a tier in memory: a copy of the same bytes, page by page."""

    def __init__(self, pages: Pages) -> None:
        self._sources = [torch.frombuffer(blob, dtype=torch.uint8) for blob in pages.blobs]
        self._targets = [torch.from_numpy(page) for page in pages.copy]

    def subject(self) -> Subject:
        """Subject that copies all pages."""
        return Subject("copy in memory", self._copy)

    def _copy(self) -> None:
        for source, target in zip(self._sources, self._targets, strict=True):
            target.copy_(source)


class Files:
    """The limit of a tier in files: new files as large as its segments, each synced when full."""

    def __init__(self, pages: Pages, folder: Path) -> None:
        self._pages = pages
        self._folder = folder / "raw"
        self._per_file = max(1, SEGMENT_BYTES // pages.layout.page_bytes)

    def write(self) -> Subject:
        """Subject that writes all pages to new files."""
        return Subject("raw files", self._write, lambda: empty_folder(self._folder))

    def read(self, before: Callable[[], None] = nothing) -> Subject:
        """Subject that reads all pages."""
        return Subject("raw files", self._read, before)

    def read_verified(self, before: Callable[[], None] = nothing) -> Subject:
        """Subject that reads all pages and computes their CRC-32C, as a tier must."""
        return Subject("raw files and checksums", lambda: self._read(verify=True), before)

    def drop_page_cache(self) -> None:
        """Ask the kernel to drop the files from the page cache."""
        drop_page_cache(self._folder)

    def _write(self) -> None:
        for number, part in enumerate(self._pages.batches(self._per_file)):
            descriptor = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT)
            for index in part:
                os.write(descriptor, self._pages.blobs[index])
            os.fsync(descriptor)
            os.close(descriptor)

    def _read(self, verify: bool = False) -> None:
        for number, part in enumerate(self._pages.batches(self._per_file)):
            descriptor = os.open(self._folder / str(number), os.O_RDONLY)
            for index in part:
                os.readv(descriptor, [self._pages.copy[index]])
                if verify:
                    google_crc32c.value(self._pages.copy[index])
            os.close(descriptor)


class RedisSocket:
    """The limit of a tier in Redis: SET and GET over one socket, in the tier's batches."""

    def __init__(self, pages: Pages, port: int) -> None:
        self._pages = pages
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._batch = max(1, BATCH_BYTES // pages.layout.page_bytes)

    def write(self) -> Subject:
        """Subject that sets all pages."""
        return Subject("plain SET on a socket", self._set)

    def read(self) -> Subject:
        """Subject that gets all pages."""
        return Subject("plain GET on a socket", self._get)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _set(self) -> None:
        for batch in self._pages.batches(self._batch):
            for index in batch:
                blob = self._pages.blobs[index]
                name = b"%08d" % index
                self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$8\r\n%b\r\n$%d\r\n" % (name, len(blob)))
                self._socket.sendall(blob)
                self._socket.sendall(b"\r\n")
            self._receive(bytearray(len(b"+OK\r\n") * len(batch)))

    def _get(self) -> None:
        size = self._pages.layout.page_bytes
        head = bytearray(len(b"$%d\r\n" % size))
        end = bytearray(2)
        for batch in self._pages.batches(self._batch):
            self._socket.sendall(
                b"".join(b"*2\r\n$3\r\nGET\r\n$8\r\n%08d\r\n" % index for index in batch)
            )
            for index in batch:
                self._receive(head)
                self._receive(self._pages.copy[index].data)
                self._receive(end)

    def _receive(self, into: bytearray | memoryview) -> None:
        rest = memoryview(into)
        while rest:
            rest = rest[self._socket.recv_into(rest) :]


class TierSubject:
    """A tier by itself. Its reads end with rows in memory that the tier does not reuse."""

    def __init__(
        self,
        pages: Pages,
        open_tier: Callable[[], Tier],
        *,
        fresh: bool = False,
        clear: Callable[[], None] = nothing,
    ) -> None:
        """Open the tier; before each write anew if it is to be `fresh`, else without the pages.

        clear: what deletes them beside the tier's own deletion.
        """
        self._pages = pages
        self._open = open_tier
        self._fresh = fresh
        self._clear = clear
        self._targets = [
            torch.from_numpy(page)[HEADER_BYTES:].view(rows.dtype).view(rows.shape)
            for page, rows in zip(pages.copy, pages.rows, strict=True)
        ]
        self._tier = open_tier()

    def write(self) -> Subject:
        """Subject that puts all pages one by one, as a row store does, and flushes."""
        return Subject("tier", self._write, self._renew)

    def read(self, before: Callable[[], None] = nothing) -> Subject:
        """Subject that gets and decodes all pages."""
        return Subject("tier", self._read, before)

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()

    def _renew(self) -> None:
        if self._fresh:
            self._tier.close()
            self._tier = self._open()
        else:
            self._tier.delete(self._pages.ids)
            self._clear()

    def _write(self) -> None:
        for page_id, blob in zip(self._pages.ids, self._pages.blobs, strict=True):
            self._tier.put([(page_id, blob)])
        self._tier.flush()

    def _read(self) -> None:
        pages = self._pages
        in_memory = not self._tier.durable
        for batch in pages.batches(BATCH_PAGES):
            for index, blob in zip(
                batch, self._tier.get([pages.ids[i] for i in batch]), strict=True
            ):
                assert blob is not None, "the tier has lost a page"
                rows = decode_page(pages.layout, parse_header(blob), blob)
                if in_memory:
                    self._targets[index].copy_(rows)


class StoreSubject:
    """A row store: rows are appended in blocks, as by prefill, and gathered by position."""

    def __init__(
        self,
        name: str,
        pages: Pages,
        open_store: Callable[[], RowStore],
        *,
        fresh: bool = False,
        clear: Callable[[], None] = nothing,
        key: bytes = b"",
    ) -> None:
        """Open the store; `fresh` and `clear` as of a TierSubject.

        key: that pages are encrypted with; empty: they are not.
        """
        self._name = name
        self._pages = pages
        self._open = open_store
        self._fresh = fresh
        self._clear = clear
        self._key = key
        self._stored = list[PageId]()
        self._store = open_store()

    def write(self) -> Subject:
        """Subject that appends all rows and flushes."""
        return Subject(self._name, self._write, self._renew)

    def read(self, before: Callable[[], None] = nothing) -> Subject:
        """Subject that gathers all rows."""
        return Subject(self._name, self._read, before)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _renew(self) -> None:
        """Begin with a session without rows."""
        self._store.close_session(SESSION)
        if self._fresh:
            self._store.close()
            self._store = self._open()
        else:
            self._store.delete(self._stored).result()
            self._clear()
        self._store.open(SESSION, [], self._key)
        self._stored = []

    def _write(self) -> None:
        for block in self._pages.blocks:
            ids = [
                make_random_id() for _ in range(block.shape[3] // self._pages.layout.page_tokens)
            ]
            self._store.append(SESSION, block, ids)
            self._stored += ids
        self._store.flush(SESSION)

    def _read(self) -> None:
        length = self._store.length(SESSION)
        for first in range(0, length, GATHER_TOKENS):
            self._store.gather(SESSION, torch.arange(first, min(first + GATHER_TOKENS, length)))


def empty_folder(folder: Path) -> None:
    """Create a folder, or delete everything in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from the page cache, which it may ignore."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bytes_from_disk(run: Callable[[], None]) -> int:
    """Bytes that a run read from the disk, not from the page cache; 0 if they are not counted."""

    def read_bytes() -> int:
        try:
            counters = Path("/proc/self/io").read_text(encoding="utf-8")
        except OSError:
            return 0
        return int(dict(line.split(": ") for line in counters.splitlines())["read_bytes"])

    before = read_bytes()
    run()
    return read_bytes() - before


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Port of a new redis-server without persistence."""
    with running(RedisProcess(folder, {"appendonly": "no"})) as server:
        yield server.port
