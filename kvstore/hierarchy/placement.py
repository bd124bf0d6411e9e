"""Placement of pages: in the lowest tier and, as copies, in the tiers above it.

A page has the same rows in every tier. The codec of the lowest tier decides once, when the page is
finished, how exact they are; a tier above holds the decoded rows as RAW (faster to read) or the
encoded page. Rows decoded from INT8 are never encoded as INT8 again.

A page that the lowest tier refuses goes to the next durable tier, or into memory as the last
resort, and stays pending until the lowest tier has it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

from kvstore.errors import PageError, TierError, TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.encryption import PageKeys
from kvstore.format.page import NO_KEY, Blob, PageId, PageLayout, parse_header
from kvstore.hierarchy.metered import MeteredTiers
from kvstore.hierarchy.pending_pages import PendingPage, PendingPages
from kvstore.tiers.base import Tier


class PagePlacement:
    """Encodes pages, puts them into tiers and deletes them; one thread at a time may write.

    `codecs` has one entry per tier, none less exact than the one below it: otherwise the rows
    would depend on the tier that is read. Raises TierSettingsError when this is violated. A page that
    names one of `keys` is encrypted with it in every tier but memory.
    `on_pending` is called when a page could not be put into the lowest tier. `on_void` is called with
    pages of which no copy in a bucket is needed any more: they are deleted, or written again.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: MeteredTiers,
        codecs: Sequence[Codec],
        keys: PageKeys,
        on_pending: Callable[[], None],
        on_void: Callable[[Collection[PageId]], None] = lambda ids: None,
    ) -> None:
        _require_order(tiers.warm, codecs)
        self._layout = layout
        self._tiers = tiers
        self._codecs = tuple(codecs)
        self._keys = keys
        self._write_order = _get_write_order(tiers.warm)
        self._pending = PendingPages()
        self._on_pending = on_pending
        self._on_void = on_void

    @property
    def lowest_codec(self) -> Codec:
        """The codec of the lowest tier, which decides what rows every reader gets."""
        return self._codecs[-1]

    def encode(
        self, page_id: PageId, rows: Tensor, key_id: bytes = NO_KEY
    ) -> tuple[Tensor, Blob | None]:
        """Encode a page for the lowest tier and return its rows as every reader gets them.

        The blob is None when encoding does not change the rows.
        """
        if self._codecs[-1] is Codec.RAW:
            return rows, None
        blob = self._encode(page_id, rows, self._codecs[-1], key_id)
        return decode_page(self._layout, parse_header(blob), blob), blob

    def write(
        self,
        page_id: PageId,
        rows: Tensor,
        blob: Blob | None = None,
        *,
        key_id: bytes = NO_KEY,
        replace: bool = False,
    ) -> None:
        """Put a page into the lowest tier that accepts it, and copies into the tiers above.

        `rows` and `blob` are results of `encode`. One that the lowest tier has stays as it is, unless
        `replace`. Raises the lowest tier's error when no tier accepts the page.
        """
        blob = blob or self._encode(page_id, rows, Codec.RAW, key_id)
        if not replace and self._is_lowest(page_id):
            depth = self._tiers.bottom
        else:
            depth = self._put_first(page_id, blob, self._write_order)
        if replace:  # A copy in a bucket may be damaged as well.
            self._on_void([page_id])
        self._record_depth(page_id, depth, replace=replace)
        self.copy_above(depth, [(page_id, blob, rows)], replace=replace)

    def copy_above(
        self, depth: int, pages: Iterable[tuple[PageId, Blob, Tensor]], *, replace: bool = False
    ) -> None:
        """Copy pages of the tier at `depth`, with their rows, into the tiers above it.

        Each tier gets the form of its codec. Files that have a page keep it, unless `replace`.
        Refused copies are only counted.
        """
        self._copy_to(range(depth), pages, replace)

    def copy_back(self, pages: Iterable[tuple[PageId, Blob, Tensor]]) -> None:
        """Copy pages of the bucket, with their rows, into the lowest tier as `copy_above`."""
        self._copy_to([self._tiers.bottom], pages, replace=False)

    def delete(self, ids: Collection[PageId]) -> None:
        """Delete pages from every tier. Raises the first error after all tiers were tried.

        From a bucket they are deleted later.
        """
        self._pending.discard(ids)
        try:
            self._delete_from(range(self._tiers.bottom, -1, -1), ids)
        finally:  # Not before: one that the lowest tier still had might be moved once more.
            self._on_void(ids)

    def delete_copies(self, ids: Collection[PageId]) -> None:
        """Delete pages from the tiers above the lowest, except pending ones."""
        copies = [page_id for page_id in ids if page_id not in self._pending]
        self._delete_from(range(self._tiers.bottom), copies)

    def delete_moved(self, ids: Collection[PageId]) -> None:
        """Delete pages from the lowest tier that lie in the bucket, except pending ones."""
        moved = [page_id for page_id in ids if page_id not in self._pending]
        if moved:
            self._tiers.delete(self._tiers.bottom, moved)

    def delete_undurable(self, ids: Collection[PageId]) -> None:
        """Delete those of the pages that memory has alone."""
        for pending in self._pending.select(ids):
            if not pending.durable:
                self._pending.discard([pending.id])
                self._delete_from([pending.depth], [pending.id])

    def flush(self, groups: Sequence[Collection[PageId]]) -> list[bool]:
        """Flush each tier that holds these pages once.

        Returns for each group of pages whether all of them are durable.
        """
        # Selected before the flush, which covers no page that is written meanwhile.
        pending = [self._pending.select(group) for group in groups]
        depths = {page.depth for pages in pending for page in pages}
        flushed = {depth for depth in depths | {self._tiers.bottom} if self._is_flushed(depth)}
        return [
            self._tiers.lowest.durable
            and self._tiers.bottom in flushed
            and all(page.durable and page.depth in flushed for page in pages)
            for pages in pending
        ]

    def keep(self, ids: Collection[PageId]) -> bool:
        """Give pages of the lowest tier their whole time to live; return whether they have it.

        Pending ones get it when the lowest tier gets them.
        """
        if self._tiers.lowest.life_seconds is None:
            return True
        try:
            self._tiers.keep(self._tiers.bottom, ids)
        except TierError:
            return all(page_id in self._pending for page_id in ids)
        return True

    def sync(self) -> None:
        """Make the deletions of all durable tiers durable. Raises a tier's error."""
        for depth, tier in enumerate(self._tiers.warm):
            if tier.durable:
                self._tiers.flush(depth)

    # Pending pages

    def add_pending(self, ids: Iterable[PageId], depth: int, *, replace: bool = False) -> None:
        """Record pages of the tier at `depth` that no tier below has.

        `replace`: or that must replace what a tier below has.
        """
        durable = self._tiers.all[depth].durable
        for page_id in ids:
            self._pending.add(PendingPage(page_id, depth, durable, replace))
            self._on_pending()

    def flush_pending(self, ids: Collection[PageId] | None = None) -> None:
        """Move those of some pages that are pending, or all, to the lowest tier."""
        for pending in self._pending.select(ids):
            try:
                self._move_down(pending)
            except TierError:
                continue
            except PageError:  # The page is unreadable, so there is nothing to move.
                self._pending.discard([pending.id])

    def has_pending(self) -> bool:
        """Return whether pages are not in the lowest tier yet."""
        return bool(self._pending)

    def get_depth(self, page_id: PageId) -> int:
        """Depth of the tier that must hold a page: the lowest, or its own while it is pending."""
        return self._pending.get_depth(page_id, self._tiers.bottom)

    def is_pending(self, page_id: PageId) -> bool:
        """Return whether a page is not in the lowest tier yet."""
        return page_id in self._pending

    def count_pending(self) -> tuple[int, int]:
        """Count the pages that are not in the lowest tier yet, and those of them in memory alone."""
        pending = self._pending.select()
        return len(pending), sum(not page.durable for page in pending)

    def has_undurable(self, ids: Collection[PageId] | None = None) -> bool:
        """Return whether some pages, or any, are held in memory alone."""
        return any(not pending.durable for pending in self._pending.select(ids))

    # Internals

    def _is_lowest(self, page_id: PageId) -> bool:
        """Return whether the lowest tier has a page, whose time to live restarts."""
        bottom = self._tiers.bottom
        try:
            if not self._tiers.contains(bottom, [page_id])[0]:
                return False
            if self._tiers.lowest.life_seconds is None:
                return True
            self._tiers.keep(bottom, [page_id])
            return self._tiers.contains(bottom, [page_id])[0]  # It may have ended in between.
        except TierError:
            return False

    def _is_flushed(self, depth: int) -> bool:
        try:
            self._tiers.flush(depth)
        except TierError:
            return False
        return True

    def _put_first(self, page_id: PageId, blob: Blob, depths: Sequence[int]) -> int:
        """Put a page into the first of `depths` that accepts it; return that depth.

        Raises the first refusal.
        """
        refusal: TierError | None = None
        for depth in depths:
            try:
                self._put(depth, page_id, blob)
            except TierError as error:
                refusal = refusal or error
            else:
                return depth
        assert refusal is not None, "there is at least one tier to write to"
        raise refusal

    def _put(self, depth: int, page_id: PageId, blob: Blob, *, backed: bool = False) -> None:
        """Put a page into a tier: encrypted, unless it is memory. Raises the tier's error."""
        if self._tiers.all[depth] is not self._tiers.memory:
            blob = self._keys.encrypt(blob)
        self._tiers.put(depth, page_id, blob, backed=backed)

    def _record_depth(self, page_id: PageId, depth: int, *, replace: bool) -> None:
        if depth == self._tiers.bottom:
            self._pending.discard([page_id])
        else:
            self.add_pending([page_id], depth, replace=replace)

    def _move_down(self, pending: PendingPage) -> None:
        blob = self._tiers.all[pending.depth].get([pending.id])[0]
        if blob is None:
            self._pending.discard([pending.id])
            return
        if not pending.replace and self._is_lowest(pending.id):
            depth = self._tiers.bottom
        else:
            preferred = self._write_order[: self._write_order.index(pending.depth)]
            depth = self._put_first(pending.id, blob, preferred)
            if depth == self._tiers.bottom:
                self._tiers.keep(depth, [pending.id])  # Its flush may be over.
        self._record_depth(pending.id, depth, replace=pending.replace)
        if not pending.durable:  # Memory may drop the page from now on.
            self._put(pending.depth, pending.id, blob, backed=True)

    def _delete_from(self, depths: Sequence[int], ids: Collection[PageId]) -> None:
        failure: TierError | None = None
        for depth in depths:
            try:
                self._tiers.delete(depth, ids)
            except TierError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _copy_to(
        self, depths: Sequence[int], pages: Iterable[tuple[PageId, Blob, Tensor]], replace: bool
    ) -> None:
        """Copy pages with their rows into tiers, each in the form of the tier's codec."""
        codecs = [self._codecs[depth] for depth in depths]
        for page_id, blob, rows in pages:
            raw = self._to_raw(blob, rows) if Codec.RAW in codecs else blob
            for depth, codec in zip(depths, codecs, strict=True):
                copy = raw if codec is Codec.RAW else blob
                self._put_copy(depth, page_id, copy, replace)

    def _put_copy(self, depth: int, page_id: PageId, blob: Blob, replace: bool) -> None:
        try:
            # Memory keeps what it has too, but is told that it may drop it from now on.
            is_file = not replace and self._tiers.all[depth].durable
            if not (is_file and self._tiers.contains(depth, [page_id])[0]):
                self._put(depth, page_id, blob, backed=True)
        except TierError:
            self._tiers.count(depth, refused_pages=1)

    def _to_raw(self, blob: Blob, rows: Tensor) -> Blob:
        header = parse_header(blob)
        if header.codec == Codec.RAW:
            return blob
        return encode_page(
            self._layout,
            header.id,
            rows,
            written_at=header.written_at,
            key_id=header.key_id,
        )

    def _encode(self, page_id: PageId, rows: Tensor, codec: Codec, key_id: bytes) -> Blob:
        now = int(time.time())
        return encode_page(self._layout, page_id, rows, codec, written_at=now, key_id=key_id)


def _get_write_order(tiers: Sequence[Tier]) -> tuple[int, ...]:
    """Depths by preference: the lowest, the durable ones above it from below, then memory."""
    bottom = len(tiers) - 1
    above = range(bottom - 1, -1, -1)
    return (
        bottom,
        *(depth for depth in above if tiers[depth].durable),
        *(depth for depth in above if not tiers[depth].durable),
    )


def _require_order(tiers: Sequence[Tier], codecs: Sequence[Codec]) -> None:
    names = [f"{tier.name}: {codec.name}" for tier, codec in zip(tiers, codecs, strict=True)]
    if list(codecs) != sorted(codecs):
        raise TierSettingsError(
            f"no tier may store rows less exactly than the tier below it, got {', '.join(names)}; "
            "set INT8 in the lowest tier too"
        )
