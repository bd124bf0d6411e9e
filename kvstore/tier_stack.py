"""The tiers of one store as a whole: written from the lowest up, read from the fastest down.

A page's rows are the same in every tier. The lowest tier's codec decides how exact they are, once, when the page is
finished; a tier above may hold the decoded rows as RAW (read faster) or the encoded page. What was decoded from INT8 is
never encoded as INT8 again, and a page is read by the codec in its header, whatever is configured now: one that was
written as RAW stays exact.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock

from torch import Tensor

from kvstore.codec import Codec, decode_page, encode_page
from kvstore.errors import KvStoreError, LostPageError, TierError, TierSettingsError
from kvstore.page import Blob, PageHeader, PageKey, PageLayout, parse_header
from kvstore.tiers.base import Tier


@dataclass(frozen=True)
class ExpectedPage:
    """A page in the one version that may be read."""

    key: PageKey
    sequence: int


@dataclass(frozen=True)
class TierCounters:
    """What one tier did since the store was opened: pages found and not found, bytes of pages."""

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    refused_pages: int = 0


class TierStack:
    """Encodes, writes, reads and decodes pages over `tiers`, fastest first. The lowest one is the truth.

    `codecs`: one per tier, RAW for all when not given. None may be less exact than the one below it, or what a reader
    gets would depend on the tier; raises TierSettingsError then.
    """

    def __init__(self, layout: PageLayout, tiers: Sequence[Tier], codecs: Sequence[Codec] | None = None) -> None:
        if not tiers or len({tier.name for tier in tiers}) != len(tiers):
            raise ValueError(f"a store needs tiers with names of their own, got {[tier.name for tier in tiers]}")
        self._layout = layout
        self._tiers = tuple(tiers)
        self._codecs = tuple(codecs or [Codec.RAW] * len(tiers))
        try:
            _require_order(tiers, self._codecs)
        except TierSettingsError:
            self.close()
            raise
        self._counters = [TierCounters() for _ in tiers]
        self._counters_lock = Lock()

    @property
    def lowest(self) -> Tier:
        """The durable tier."""
        return self._tiers[-1]

    def settled(self, page: ExpectedPage, rows: Tensor) -> tuple[Tensor, Blob | None]:
        """The rows as every reader of the page shall get them, and the page if encoding changed them.

        Only a finished page is changed: an unfinished one will be read to be finished, and its rows must not be
        quantised twice.
        """
        if self._codecs[-1] is Codec.RAW or rows.shape[3] < self._layout.page_tokens:
            return rows, None
        blob = bytearray(encode_page(self._layout, page.key, page.sequence, rows, self._codecs[-1]))
        return decode_page(self._layout, parse_header(blob), blob), blob

    def write(self, page: ExpectedPage, rows: Tensor, blob: Blob | None = None) -> None:
        """Put what `settled` made of a page into every tier. Raises what the lowest tier refuses with."""
        blob = blob or encode_page(self._layout, page.key, page.sequence, rows)
        self.lowest.put([(page.key, blob)])
        lowest = len(self._tiers) - 1
        self._count(lowest, written_bytes=len(blob))
        self._keep_above(lowest, [(page.key, blob, rows)])

    def read(self, pages: Sequence[ExpectedPage], *, promote: bool = True) -> list[Tensor]:
        """The rows of the pages, in their order, each from the fastest tier that has the expected version.

        What came from a lower tier is put into the ones above it, if `promote`. Raises LostPageError when no
        tier has a page, and the PageError of the lowest tier when its copy cannot be used.
        """
        found: dict[PageKey, Tensor] = {}
        missing = list(pages)
        for depth in range(len(self._tiers)):
            read = self._read_from(depth, missing)
            found |= {key: decode_page(self._layout, *page) for key, page in read.items()}
            if promote:
                self._keep_above(depth, [(key, blob, found[key]) for key, (_, blob) in read.items()])
            missing = [page for page in missing if page.key not in found]
            if not missing:
                break
        if missing:
            raise LostPageError(f"no tier holds {missing[0]}; its rows must be computed again")
        return [found[page.key] for page in pages]

    def delete(self, keys: Sequence[PageKey]) -> None:
        """Forget pages in every tier."""
        for tier in self._tiers:
            tier.delete(keys)

    def highest_sequence(self) -> int:
        """The largest sequence number of any stored page, in whatever tier; 0 when there is none."""
        return max((header.sequence for tier in self._tiers for header in tier.stored()), default=0)

    def counters(self) -> dict[str, TierCounters]:
        """What each tier did, by the tier's name."""
        with self._counters_lock:
            return {tier.name: counters for tier, counters in zip(self._tiers, self._counters, strict=True)}

    def used_bytes(self) -> dict[str, int]:
        """Bytes of the pages that each tier holds, by the tier's name."""
        return {tier.name: tier.used_bytes for tier in self._tiers}

    def check(self) -> None:
        """Check every tier's books."""
        for tier in self._tiers:
            tier.check()

    def close(self) -> None:
        """Close every tier."""
        for tier in self._tiers:
            tier.close()

    def _read_from(self, depth: int, pages: Sequence[ExpectedPage]) -> dict[PageKey, tuple[PageHeader, Blob]]:
        tier = self._tiers[depth]
        try:
            blobs = tier.get([page.key for page in pages])
        except KvStoreError:
            # A copy above the lowest tier is a convenience: if it fails, the page comes from below.
            if tier is self.lowest:
                raise
            blobs = [None] * len(pages)
        found: dict[PageKey, tuple[PageHeader, Blob]] = {}
        for page, blob in zip(pages, blobs, strict=True):
            if blob is not None and (header := parse_header(blob)).sequence == page.sequence:
                found[page.key] = (header, blob)
        read_bytes = sum(len(blob) for _, blob in found.values())
        self._count(depth, hits=len(found), misses=len(pages) - len(found), read_bytes=read_bytes)
        return found

    def _keep_above(self, depth: int, pages: Sequence[tuple[PageKey, Blob, Tensor]]) -> None:
        """Pages of the tier at `depth`, and their rows, for the tiers above it: each gets its own form of them."""
        encoded = [(key, blob) for key, blob, _ in pages]
        if Codec.RAW in self._codecs[:depth]:
            exact = [(key, self._as_raw(blob, rows)) for key, blob, rows in pages]
        for above in range(depth):
            self._keep_copies(above, exact if self._codecs[above] is Codec.RAW else encoded)

    def _as_raw(self, blob: Blob, rows: Tensor) -> Blob:
        header = parse_header(blob)
        if header.codec == Codec.RAW:
            return blob
        return encode_page(self._layout, header.key, header.sequence, rows)

    def _keep_copies(self, depth: int, copies: Sequence[tuple[PageKey, Blob]]) -> None:
        tier = self._tiers[depth]
        for key, blob in copies:
            try:
                tier.put([(key, blob)], backed=True)
            except TierError:
                # The tier below has the page. An older copy up here would only take room.
                self._count(depth, refused_pages=1)
                with suppress(TierError):
                    tier.delete([key])
            else:
                self._count(depth, written_bytes=len(blob))

    def _count(self, depth: int, **more: int) -> None:
        with self._counters_lock:
            counters = self._counters[depth]
            sums = {field: getattr(counters, field) + amount for field, amount in more.items()}
            self._counters[depth] = replace(counters, **sums)


def _require_order(tiers: Sequence[Tier], codecs: Sequence[Codec]) -> None:
    names = [f"{tier.name}: {codec.name}" for tier, codec in zip(tiers, codecs, strict=True)]
    if list(codecs) != sorted(codecs):
        raise TierSettingsError(f"no tier may keep rows less exactly than the one below it, got {', '.join(names)}; "
                                "give the lowest tier INT8 too")  # fmt: skip
