"""Allocation of page memory from one block of addresses, with automatic release."""

import mmap
import weakref
from bisect import bisect
from collections import deque
from contextlib import suppress
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TierSettingsError

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector load."""
CHUNK = 2 << 20
"""Bytes of a huge page: memory is given back to the system in whole ones."""

Buffer = NDArray[np.uint8]


class Arena:
    """First-fit allocator over `limit_bytes` bytes, lowest addresses first.

    The system gives memory when it is first allocated, and gets it back by `trim` alone. Reused memory
    costs nothing; the first touch of new memory costs more than the copy, and far more without huge
    pages.

    An allocation is freed when its array and everything that refers to it (memoryviews, slices,
    tensors on them) is gone, so a page may be dropped while it is read. Calls must be serialised by
    the caller; allocations may be freed in any thread at any time. The memory is not pinned for a GPU:
    rows are gathered or copied into other memory that one reads, and the system would have to
    give pinned memory whole at the start.

    Raises TierSettingsError when the memory cannot be allocated.
    """

    def __init__(self, limit_bytes: int) -> None:
        size = -(-limit_bytes // ALIGNMENT) * ALIGNMENT
        try:
            self._map = _map_memory(max(size, 1))
        except (OSError, OverflowError, ValueError) as error:
            raise TierSettingsError(
                f"cannot allocate {limit_bytes} bytes of memory for pages: {error}; lower the limit"
            ) from error
        self._memory = np.frombuffer(self._map, dtype=np.uint8)
        # Chunks that the system may have given memory for.
        self._touched = np.zeros(-(-size // CHUNK), dtype=np.bool_)
        self._free_offsets = [0] if size else []
        self._free_sizes = {0: size} if size else {}
        # An allocation may be freed during a change of the free list, even in the same thread,
        # so freed stretches are queued here.
        self._freed: deque[tuple[int, int]] = deque()
        self._allocated: dict[int, weakref.ref[Buffer]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        self._collect_freed()
        return sum(self._free_sizes.values())

    @property
    def touched_bytes(self) -> int:
        """Bytes that the system has given memory for at most, in whole chunks."""
        return int(self._touched.sum()) * CHUNK

    def trim(self, most_bytes: int) -> None:
        """Give free memory back to the system, the highest addresses first, until `most_bytes` are touched.

        More stays touched where it is allocated, or free in pieces of less than a chunk.
        """
        excess = -(-(self.touched_bytes - most_bytes) // CHUNK)
        if excess <= 0:
            return
        self._collect_freed()
        for begin in reversed(self._free_offsets):
            first, end = -(-begin // CHUNK), (begin + self._free_sizes[begin]) // CHUNK
            given_back = np.flatnonzero(self._touched[first:end])[-excess:] + first
            if given_back.size:
                start = int(given_back[0])
                self._map.madvise(mmap.MADV_DONTNEED, start * CHUNK, (end - start) * CHUNK)
                self._touched[start:end] = False
                excess -= given_back.size
            if not excess:
                break

    def allocate(self, size: int) -> Buffer | None:
        """Allocate an uninitialised uint8 `[size]`; None when no free stretch is long enough."""
        self._collect_freed()
        aligned = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        fitting = (begin for begin in self._free_offsets if self._free_sizes[begin] >= aligned)
        begin = next(fitting, None)
        if begin is None:
            return None
        free = self._free_sizes.pop(begin)
        index = bisect(self._free_offsets, begin) - 1
        if free == aligned:
            del self._free_offsets[index]
        else:
            self._free_offsets[index] = begin + aligned
            self._free_sizes[begin + aligned] = free - aligned
        self._touched[begin // CHUNK : -(-(begin + aligned) // CHUNK)] = True
        part = self._memory[begin : begin + size]
        on_free = partial(_queue_freed, self._freed, (begin, aligned))
        self._allocated[begin] = weakref.ref(part, on_free)
        return part

    def _collect_freed(self) -> None:
        while self._freed:
            begin, size = self._freed.popleft()
            del self._allocated[begin]
            self._merge(begin, size)

    def _merge(self, begin: int, size: int) -> None:
        """Add a stretch to the free list, merged with its free neighbours."""
        index = bisect(self._free_offsets, begin)
        if index < len(self._free_offsets) and self._free_offsets[index] == begin + size:
            size += self._free_sizes.pop(self._free_offsets.pop(index))
        previous = self._free_offsets[index - 1] if index else None
        if previous is not None and previous + self._free_sizes[previous] == begin:
            self._free_sizes[previous] += size
        else:
            self._free_offsets.insert(index, begin)
            self._free_sizes[begin] = size


class BufferPool:
    """Buffers for pages that a tier reads: from an arena while it has room, else new memory.

    Safe to call from several threads.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._arena = Arena(limit_bytes)
        self._lock = Lock()

    def allocate(self, size: int) -> memoryview:
        """Allocate `size` uninitialised bytes, freed when nothing refers to them any more."""
        with self._lock:
            part = self._arena.allocate(size)
        return (np.empty(size, dtype=np.uint8) if part is None else part).data


def _map_memory(size: int) -> mmap.mmap:
    """Map private memory, in huge pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _queue_freed(
    freed: deque[tuple[int, int]], part: tuple[int, int], _: "weakref.ref[Buffer]"
) -> None:
    freed.append(part)
