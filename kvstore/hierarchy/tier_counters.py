"""What the tiers of a store did, counted and timed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Literal

from kvstore.errors import KvStoreError, StaleWriterError


@dataclass(frozen=True)
class TierCounters:
    """What one tier did since the store was opened.

    `hits` and `misses` are pages that were found and not found, `refused_pages` copies that it did not take. `reads`
    and `writes` are calls, deletions among the writes, with the seconds that they took together; `errors` those that
    failed.
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


class TierMeter:
    """Keeps one tier's counters. Safe to use from several threads."""

    def __init__(self) -> None:
        self._counters = TierCounters()
        self._lock = Lock()

    @property
    def counters(self) -> TierCounters:
        """As they are now."""
        return self._counters

    def count(self, **more: float) -> None:
        """Add to counters, by their names."""
        with self._lock:
            sums = {name: getattr(self._counters, name) + amount for name, amount in more.items()}
            self._counters = replace(self._counters, **sums)

    @contextmanager
    def timed(self, kind: Literal["read", "write"]) -> Iterator[None]:
        """Count a call, how long it takes and whether it fails."""
        started = perf_counter()
        errors = 0
        try:
            yield
        except StaleWriterError:
            raise  # the tier did what it is for
        except KvStoreError:
            errors = 1
            raise
        finally:
            self.count(
                **{f"{kind}s": 1, f"{kind}_seconds": perf_counter() - started, "errors": errors}
            )
