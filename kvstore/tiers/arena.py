"""One stretch of memory for pages: a page is copied in once, and whoever reads it reads it where it lies."""

import weakref
from bisect import bisect
from collections import deque
from functools import partial
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.errors import TierSettingsError

ALIGNMENT = 64
"""Bytes: of a cache line, and of the widest number that a processor loads at once."""

Buffer = NDArray[np.uint8]


class Arena:
    """Lends parts of `limit_bytes` bytes, which are touched only when they are first lent, the lowest first.

    Memory that was lent before costs nothing to lend again; the first touch of new memory costs more than the copy
    (numpy asks the kernel for large pages, or it would cost far more).

    A part comes back by itself when its array, and everything that refers to it (memoryviews and their slices, tensors
    made of those), is gone. So a page can be dropped while it is read. Calls must take turns; parts may come back in
    any thread at any time. `pinned`: so that a GPU can copy to and from there on its own, if there is one.

    Raises TierSettingsError when there is not so much memory.
    """

    def __init__(self, limit_bytes: int, *, pinned: bool = False) -> None:
        size = -(-limit_bytes // ALIGNMENT) * ALIGNMENT
        try:
            self._memory = (
                _pinned(size)
                if pinned and torch.cuda.is_available()
                else np.empty(size, dtype=np.uint8)
            )
        except (RuntimeError, MemoryError, ValueError) as error:
            raise TierSettingsError(
                f"{limit_bytes} bytes of memory for pages cannot be had: {error}"
            ) from error
        self._begins = [0] if size else []
        self._sizes = {0: size} if size else {}
        # A part may come back while the books are being changed, even in the same thread: it waits here.
        self._returned: deque[tuple[int, int]] = deque()
        self._lent: dict[int, weakref.ref[Buffer]] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that are not lent."""
        self._take_back()
        return sum(self._sizes.values())

    def lend(self, size: int) -> Buffer | None:
        """A part of `size` bytes with whatever is in it, uint8 `[size]`; None when no free stretch is as long."""
        self._take_back()
        wanted = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        begin = next((begin for begin in self._begins if self._sizes[begin] >= wanted), None)
        if begin is None:
            return None
        free = self._sizes.pop(begin)
        at = bisect(self._begins, begin) - 1
        if free == wanted:
            del self._begins[at]
        else:
            self._begins[at] = begin + wanted
            self._sizes[begin + wanted] = free - wanted
        part = self._memory[begin : begin + size]
        self._lent[begin] = weakref.ref(part, partial(_hand_back, self._returned, (begin, wanted)))
        return part

    def _take_back(self) -> None:
        while self._returned:
            begin, size = self._returned.popleft()
            del self._lent[begin]
            self._merge(begin, size)

    def _merge(self, begin: int, size: int) -> None:
        """Free a stretch, as one with the free ones beside it."""
        at = bisect(self._begins, begin)
        if at < len(self._begins) and self._begins[at] == begin + size:
            size += self._sizes.pop(self._begins.pop(at))
        if at and self._begins[at - 1] + self._sizes[self._begins[at - 1]] == begin:
            self._sizes[self._begins[at - 1]] += size
        else:
            self._begins.insert(at, begin)
            self._sizes[begin] = size


class Buffers:
    """Memory for pages on their way out of a tier: of an arena while it has any, else new. Safe for several threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._arena = Arena(limit_bytes)
        self._lock = Lock()

    def lend(self, size: int) -> memoryview:
        """`size` bytes with whatever is in them; they come back when nothing refers to them any more."""
        with self._lock:
            part = self._arena.lend(size)
        return (np.empty(size, dtype=np.uint8) if part is None else part).data


def _pinned(size: int) -> Buffer:
    memory: Buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def _hand_back(
    returned: deque[tuple[int, int]], part: tuple[int, int], _: "weakref.ref[Buffer]"
) -> None:
    returned.append(part)
