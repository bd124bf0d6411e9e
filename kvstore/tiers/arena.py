"""Allocation of page memory from one preallocated block, with automatic release."""

import weakref
from bisect import bisect
from collections import deque
from functools import partial
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import TierSettingsError

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector load."""

Buffer = NDArray[np.uint8]


class Arena:
    """First-fit allocator over `limit_bytes` bytes, lowest addresses first.

    Memory is touched only when it is first allocated. Reused memory costs nothing; the first touch
    of new memory costs more than the copy, and far more without the huge pages that numpy requests.

    An allocation is freed when its array and everything that refers to it (memoryviews, slices,
    tensors on them) is gone, so a page may be dropped while it is read. Calls must be serialised by
    the caller; allocations may be freed in any thread at any time. `pinned` memory lets a GPU, if
    there is one, copy from and to it directly.

    Raises TierSettingsError when the memory cannot be allocated.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool = False) -> None:
        size = -(-limit_bytes // ALIGNMENT) * ALIGNMENT
        try:
            self._memory = _allocate_pinned(size) if pinned else np.empty(size, dtype=np.uint8)
        except (RuntimeError, MemoryError, ValueError) as error:
            raise TierSettingsError(
                f"cannot allocate {limit_bytes} bytes of memory for pages: {error}; lower the limit"
            ) from error
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


def _allocate_pinned(size: int) -> Buffer:
    """Allocate memory that a GPU copies directly; of another kind where there is no GPU."""
    import torch  # takes seconds: tiers of files are opened without it

    if not torch.cuda.is_available():
        return np.empty(size, dtype=np.uint8)
    memory: Buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _queue_freed(
    freed: deque[tuple[int, int]], part: tuple[int, int], _: "weakref.ref[Buffer]"
) -> None:
    freed.append(part)
