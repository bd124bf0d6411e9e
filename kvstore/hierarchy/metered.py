"""The tiers of a store, each by its depth: calls are counted, timed and go under the writer's epoch."""

from collections.abc import Sequence
from contextlib import suppress

from kvstore.errors import TierError, TierFailedError
from kvstore.format.page import Blob, PageHeader, PageKey
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.tier_counters import TierCounters, TierMeter
from kvstore.tiers.base import Tier


class MeteredTiers:
    """`all` tiers, fastest first: depth 0 is the fastest, `bottom` the lowest, which decides which pages there are.

    A lowest tier that failed is not written to until it was seen to answer again: the writes of all sessions stand in
    one queue, and must not wait for it one after the other.
    """

    def __init__(self, tiers: Sequence[Tier], epochs: WriterEpochs) -> None:
        if not tiers or len({tier.name for tier in tiers}) != len(tiers):
            raise ValueError(
                f"a store needs tiers with names of their own, got {[tier.name for tier in tiers]}"
            )
        self.all = tuple(tiers)
        self.bottom = len(tiers) - 1
        self._meters = [TierMeter() for _ in tiers]
        self._epochs = epochs
        self._down: TierFailedError | None = None

    @property
    def lowest(self) -> Tier:
        """The tier that decides which pages there are."""
        return self.all[-1]

    @property
    def memory(self) -> Tier | None:
        """The fastest tier, if it is memory above another one."""
        return None if self.all[0].durable or self.bottom == 0 else self.all[0]

    def get(self, depth: int, keys: Sequence[PageKey]) -> list[Blob | None]:
        """What a tier has of some pages. Raises what it fails with, PageError."""
        with self._meters[depth].timed("read"):
            return self.all[depth].get(keys)

    def stored(self, depth: int, session: str) -> dict[int, PageHeader]:
        """The headers of a session's pages, by index. Raises what the tier fails with."""
        with self._meters[depth].timed("read"):
            return {header.key.index: header for header in self.all[depth].stored(session)}

    def put(
        self, depth: int, key: PageKey, blob: Blob, epoch: int | None, *, backed: bool = False
    ) -> None:
        """Put a page that was handed over under `epoch`. Raises what the tier fails with, StaleWriterError."""
        self._require_up(depth)
        try:
            with self._meters[depth].timed("write"):
                self.all[depth].put(
                    [(key, blob)], backed=backed, epoch=self._epochs.now(key.session, epoch)
                )
        except TierFailedError as error:
            if depth == self.bottom:
                self._down = error
            raise
        self._meters[depth].count(written_bytes=len(blob))

    def delete(self, depth: int, keys: Sequence[PageKey], epoch: int | None = None) -> None:
        """Delete pages that were to go under `epoch`. Raises as `put`."""
        self._require_up(depth)
        for session in {key.session for key in keys}:
            of_session = [key for key in keys if key.session == session]
            with self._meters[depth].timed("write"):
                self.all[depth].delete(of_session, epoch=self._epochs.now(session, epoch))

    def fence(self, session: str, epoch: int) -> None:
        """Be the session's writer in every shared tier. Raises StaleWriterError and what a tier failed with."""
        self._epochs.take(session, epoch)
        for depth, tier in enumerate(self.all):
            if tier.shared:
                with self._meters[depth].timed("write"):
                    tier.fence(session, epoch)

    def count(self, depth: int, **more: int) -> None:
        """Add to a tier's counters, by their names."""
        self._meters[depth].count(**more)

    def probe(self) -> None:
        """See whether a lowest tier that failed answers again."""
        if self._down is None:
            return
        with suppress(TierError):
            self.lowest.contains([PageKey("probe", 0)])
            self._down = None

    def try_again(self) -> None:
        """Write to the lowest tier again, whether it was seen to answer or not."""
        self._down = None

    def counters(self) -> dict[str, TierCounters]:
        """What each tier did, by the tier's name."""
        return {
            tier.name: meter.counters for tier, meter in zip(self.all, self._meters, strict=True)
        }

    def used_bytes(self) -> dict[str, int]:
        """Bytes of the pages that each tier holds, by the tier's name."""
        return {tier.name: tier.used_bytes for tier in self.all}

    def limit_bytes(self) -> dict[str, int | None]:
        """The most bytes that each tier takes, by the tier's name."""
        return {tier.name: tier.limit_bytes for tier in self.all}

    def check(self) -> None:
        """Check every tier's books."""
        for tier in self.all:
            tier.check()

    def close(self) -> None:
        """Close every tier."""
        for tier in self.all:
            tier.close()

    def _require_up(self, depth: int) -> None:
        if depth == self.bottom and self._down is not None:
            raise self._down
