"""A tier whose device may hang: calls give up after a time, then fail at once until it answers.

A file system that hangs (a network volume, a dying disk) blocks the calling thread in the kernel,
where no timeout reaches it. So calls run on threads of the tier's own: its writes in order on one,
everything else on others. A hung tier then costs its callers one timeout, and other tiers go on.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from kvstore.errors import StoreClosedError, TierFailedError
from kvstore.format.page import Blob, PageHeader, PageId
from kvstore.tiers.base import DeviceStatus, Tier

CALL_SECONDS = 10.0
"""Seconds after which a call counts as hung. Syncs and compaction under load take a few."""

_READERS = 4

_T = TypeVar("_T")


class BoundedTier:
    """A Tier that bounds the duration of every call of `tier` by `timeout_seconds`.

    A call that gave up may still take effect later, before every later write. Callers tolerate
    that: what fails is tried again. Raises TierFailedError for a hung call, and for every call while
    one is hung.
    """

    def __init__(self, tier: Tier, timeout_seconds: float = CALL_SECONDS) -> None:
        self.name = tier.name
        self.durable = tier.durable
        self.shared = tier.shared
        self._tier = tier
        self._timeout_seconds = timeout_seconds
        self._writer = ThreadPoolExecutor(1, f"kvstore-{tier.name}-write")
        self._others = ThreadPoolExecutor(_READERS, f"kvstore-{tier.name}-read")
        self._hung = set[Future[Any]]()
        self._closed = False

    @property
    def limit_bytes(self) -> int | None:
        """Maximum bytes that the tier accepts; None when only its device limits it."""
        return self._tier.limit_bytes

    @property
    def life_seconds(self) -> float | None:
        """Seconds after which a page ends that is neither put nor kept."""
        return self._tier.life_seconds

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that the tier holds, headers included."""
        return self._tier.used_bytes

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        """Return pages in the order of `ids`, None where the tier has none."""
        return self._run(self._others, lambda: self._tier.get(ids))

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        """Store sealed pages."""
        self._run(self._writer, lambda: self._tier.put(pages, backed=backed))

    def keep(self, ids: Sequence[PageId]) -> None:
        """Restart the time to live of pages."""
        self._run(self._others, lambda: self._tier.keep(ids))

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        """Return whether the tier has each page."""
        return self._run(self._others, lambda: self._tier.contains(ids))

    def delete(self, ids: Sequence[PageId]) -> None:
        """Delete pages."""
        self._run(self._writer, lambda: self._tier.delete(ids))

    def stored(self) -> Iterator[PageHeader]:
        """Yield the headers of all stored pages, in a time that is not bounded."""
        return self._tier.stored()

    def list_ids(self, written_before: int) -> list[PageId]:
        """Return the ids of the pages that were written before a time in unix seconds."""
        return self._run(self._others, lambda: self._tier.list_ids(written_before))

    def flush(self) -> None:
        """Wait until everything before is durable. Writes go on meanwhile."""
        self._run(self._others, self._tier.flush)

    def get_device(self) -> DeviceStatus | None:
        """Return the state of the file system that the tier is on."""
        return self._run(self._others, self._tier.get_device)

    def check(self) -> None:
        """Raise InvariantError when the tier's accounting disagrees with its contents."""
        self._tier.check()

    def close(self) -> None:
        """Release the tier's resources, except those of a hung tier. May be called twice."""
        self._closed = True
        for executor in (self._writer, self._others):
            executor.shutdown(wait=not self._hung, cancel_futures=bool(self._hung))
        if not self._hung:
            self._tier.close()

    def _run(self, executor: ThreadPoolExecutor, call: Callable[[], _T]) -> _T:
        if self._closed:
            raise StoreClosedError(f"tier {self.name} is closed")
        if self._hung:
            raise TierFailedError(f"tier {self.name} has not answered yet")
        future = executor.submit(call)
        try:
            return future.result(self._timeout_seconds)
        except FutureTimeoutError:
            if future.done():  # The call itself raised it, or ended just now.
                return future.result()
            if not future.cancel():
                self._hung.add(future)
                future.add_done_callback(self._hung.discard)
            raise TierFailedError(
                f"tier {self.name} did not answer within {self._timeout_seconds} s"
            ) from None
