"""The tiers of a store by depth: calls are counted and timed."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Literal

from kvstore.errors import KvStoreError, StoreClosedError, TierError, TierFailedError, TierFullError
from kvstore.format.page import ID_BYTES, Blob, PageId
from kvstore.tiers.base import DeviceStatus, Tier
from kvstore.tiers.bucket.tier import BucketTier
from kvstore.tiers.ram import RamTier

Operation = Literal["read", "write", "delete"]
CallObserver = Callable[[str, Operation, float], None]
"""Called with a tier's name, the kind of a call, and its seconds, on the thread of the call."""


@dataclass(frozen=True)
class TierCounters:
    """Activity of one tier since the store was opened.

    Attributes:
        hits: Pages that were found.
        misses: Pages that were not found.
        read_bytes: Bytes of the pages that were read.
        written_bytes: Bytes of the pages that were written.
        refused_pages: Copies of pages that the tier did not accept.
        errors: Calls that failed.
        reads: Read calls.
        writes: Write calls, deletions included.
        read_seconds: Total duration of the read calls.
        write_seconds: Total duration of the write calls.
        prefetched_pages: Pages that were read into the tier before they were asked for.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    refused_pages: int = 0
    errors: int = 0
    reads: int = 0
    writes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    prefetched_pages: int = 0


@dataclass(frozen=True)
class TierStatus:
    """A tier at the moment.

    Attributes:
        used_bytes: Bytes of its pages, headers included.
        limit_bytes: Most bytes that it accepts; None without a limit.
        shared: True when other processes write to it too.
        failure: Reason why it accepts no calls now; None when it works.
        counters: Activity since the store was opened.
        device: File system that it is on; None for a tier without files, or a hung one.
    """

    used_bytes: int
    limit_bytes: int | None
    shared: bool
    failure: str | None
    counters: TierCounters
    device: DeviceStatus | None


class TierMeter:
    """Updates one tier's counters. Safe to call from several threads."""

    def __init__(self, name: str, on_call: CallObserver | None = None) -> None:
        self._name = name
        self._on_call = on_call
        self._counters = TierCounters()
        self._failures: dict[str, str] = {}
        self._lock = Lock()

    @property
    def counters(self) -> TierCounters:
        """Current values."""
        return self._counters

    @property
    def failure(self) -> str | None:
        """Message of the tier's failure; None when its last calls were successful.

        A successful write also proves that the tier can be read.
        """
        return next(iter(self._failures.copy().values()), None)

    def count(self, **amounts: float) -> None:
        """Add to counters, by their names."""
        with self._lock:
            sums = {
                name: getattr(self._counters, name) + amount for name, amount in amounts.items()
            }
            self._counters = replace(self._counters, **sums)

    @contextmanager
    def timed(self, operation: Operation) -> Iterator[None]:
        """Count a call, its duration and its failure."""
        kind: Literal["read", "write"] = "read" if operation == "read" else "write"
        started = perf_counter()
        errors = 0
        try:
            with self.watched(kind):
                yield
        except KvStoreError:
            errors = 1
            raise
        finally:
            seconds = perf_counter() - started
            self.count(**{f"{kind}s": 1, f"{kind}_seconds": seconds, "errors": errors})
            if self._on_call is not None:
                self._on_call(self._name, operation, seconds)

    @contextmanager
    def watched(self, kind: Literal["read", "write", "flush"]) -> Iterator[None]:
        """Record whether calls of this kind fail, uncounted."""
        try:
            yield
        except TierFailedError as error:
            self._failures[kind] = str(error)
            raise
        self._failures.pop(kind, None)
        if kind == "write":
            self._failures.pop("read", None)


class MeteredTiers:
    """All tiers of a store, fastest first: depth 0 is the fastest, `bottom` the lowest.

    Behind the lowest one there may be a bucket, at depth `cold`: it has pages that were moved there.

    The lowest tier is authoritative for which pages exist beside these. After it failed, it is not written to
    until a probe succeeds: the writes of all sessions share one queue, and each would otherwise
    wait for a timeout in turn.

    Raises ValueError unless there is a tier and all names differ.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        on_call: CallObserver | None = None,
        bucket: BucketTier | None = None,
    ) -> None:
        self.all: tuple[Tier, ...] = (*tiers, *(() if bucket is None else (bucket,)))
        names = [tier.name for tier in self.all]
        if not tiers or len(set(names)) != len(names):
            raise ValueError(f"a store needs at least one tier and unique names, got {names}")
        self.bottom = len(tiers) - 1
        self.bucket = bucket
        self._meters = [TierMeter(name, on_call) for name in names]
        self._down: TierFailedError | None = None

    @property
    def lowest(self) -> Tier:
        """The lowest tier, which is authoritative for which pages exist."""
        return self.all[self.bottom]

    @property
    def warm(self) -> Sequence[Tier]:
        """The tiers without the bucket, fastest first."""
        return self.all[: self.cold]

    @property
    def cold(self) -> int:
        """Depth of the bucket, if there is one."""
        return self.bottom + 1

    @property
    def memory(self) -> RamTier | None:
        """The fastest tier if it is memory, else None."""
        return first if isinstance(first := self.all[0], RamTier) else None

    def get(self, depth: int, ids: Sequence[PageId]) -> list[Blob | None]:
        """Pages of one tier, None where it has none. Raises the tier's error or a PageError."""
        with self._meters[depth].timed("read"):
            return self.all[depth].get(ids)

    def contains(self, depth: int, ids: Sequence[PageId]) -> list[bool]:
        """Return which pages one tier has. Raises the tier's error."""
        with self._meters[depth].timed("read"):
            return self.all[depth].contains(ids)

    def put(self, depth: int, page_id: PageId, blob: Blob, *, backed: bool = False) -> None:
        """Put a page into one tier. Raises the tier's error."""
        self._require_up(depth)
        try:
            with self._meters[depth].timed("write"):
                self.all[depth].put([(page_id, blob)], backed=backed)
        except TierFailedError as error:
            if depth == self.bottom:
                self._down = error
            raise
        self._meters[depth].count(written_bytes=len(blob))

    def put_all(self, depth: int, pages: Sequence[tuple[PageId, Blob]]) -> None:
        """Put pages into one tier above or below the lowest, in one call. Raises the tier's error."""
        if not pages:
            return
        try:
            with self._meters[depth].timed("write"):
                self.all[depth].put(pages)
        except TierFullError:
            self.count(depth, refused_pages=len(pages))
            raise
        self.count(depth, written_bytes=sum(len(blob) for _, blob in pages))

    def delete(self, depth: int, ids: Collection[PageId]) -> None:
        """Delete pages from one tier. Raises as `put`."""
        self._require_up(depth)
        with self._meters[depth].timed("delete"):
            self.all[depth].delete(list(ids))

    @contextmanager
    def watched_cold(self) -> Iterator[None]:
        """Record whether calls of the bucket fail, uncounted."""
        with self._meters[self.cold].watched("read"):
            yield

    def flush(self, depth: int) -> None:
        """Make the writes to a tier as durable as it can. Raises its error."""
        with self._meters[depth].watched("flush"):
            self.all[depth].flush()

    @property
    def life_seconds(self) -> float | None:
        """The shortest time to live of unused pages in a tier; None if they live for ever in all."""
        lives = [life for tier in self.all if (life := tier.life_seconds) is not None]
        return min(lives, default=None)

    def keep(self, depth: int, ids: Collection[PageId]) -> None:
        """Restart the pages' time to live in one tier. Raises as `put`."""
        self._require_up(depth)
        if self.all[depth].life_seconds is not None:
            with self._meters[depth].timed("write"):
                self.all[depth].keep(list(ids))

    def renew(self, ids: Collection[PageId]) -> None:
        """Restart the pages' time to live in all tiers that answer."""
        for depth in range(len(self.all)):
            with suppress(TierError, StoreClosedError):
                self.keep(depth, ids)

    def count(self, depth: int, **amounts: int) -> None:
        """Add to a tier's counters, by their names."""
        self._meters[depth].count(**amounts)

    def probe(self) -> None:
        """Check whether a failed lowest tier answers again."""
        if self._down is None:
            return
        with suppress(TierError):
            with self._meters[self.bottom].watched("read"):
                self.lowest.contains([bytes(ID_BYTES)])
            self._down = None

    def clear_failure(self) -> None:
        """Write to the lowest tier again without a probe."""
        self._down = None

    def get_status(self) -> dict[str, TierStatus]:
        """Contents and activity of each tier, by its name."""
        return {
            tier.name: TierStatus(
                tier.used_bytes,
                tier.limit_bytes,
                tier.shared,
                meter.failure,
                meter.counters,
                _get_device(tier),
            )
            for tier, meter in zip(self.all, self._meters, strict=True)
        }

    def failures(self) -> dict[str, str]:
        """Reasons of the tiers that accept no calls now, by their names; empty when all work."""
        failures = {
            tier.name: meter.failure for tier, meter in zip(self.all, self._meters, strict=True)
        }
        return {name: failure for name, failure in failures.items() if failure is not None}

    def used_bytes(self) -> dict[str, int]:
        """Bytes of the pages in each tier, by its name."""
        return {tier.name: tier.used_bytes for tier in self.all}

    def check(self) -> None:
        """Check the accounting of every tier. Raises InvariantError."""
        for tier in self.all:
            tier.check()

    def close(self) -> None:
        """Close every tier."""
        for tier in self.all:
            tier.close()

    def _require_up(self, depth: int) -> None:
        if depth == self.bottom and self._down is not None:
            raise self._down


def _get_device(tier: Tier) -> DeviceStatus | None:
    """The file system under a tier; None if there is none, or it does not answer."""
    try:
        return tier.get_device()
    except (TierError, StoreClosedError):
        return None
