"""Placement of pages: in the lowest tier and, as copies, in the tiers above it.

A page has the same rows in every tier. The codec of the lowest tier decides once, when the page is
finished, how exact they are; a tier above holds the decoded rows as RAW (faster to read) or the
encoded page. Rows decoded from INT8 are never encoded as INT8 again.

A page that the lowest tier refuses goes to the next durable tier, or into memory as the last
resort, and stays pending until the lowest tier has it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from kvstore.errors import PageError, StaleWriterError, TierError, TierSettingsError
from kvstore.format.codec import Codec, decode_page, encode_page
from kvstore.format.page import Blob, PageHeader, PageKey, PageLayout, parse_header
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.metered import MeteredTiers
from kvstore.hierarchy.pending_pages import PendingPage, PendingPages
from kvstore.tiers.base import Tier


class PagePlacement:
    """Encodes pages, puts them into tiers and deletes them; one thread at a time may write.

    `codecs` has one entry per tier, none less exact than the one below it: otherwise the rows
    would depend on the tier that is read. Raises TierSettingsError when this is violated.
    `on_pending` is called when a page could not be put into the lowest tier.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: MeteredTiers,
        codecs: Sequence[Codec],
        on_pending: Callable[[], None],
    ) -> None:
        _require_order(tiers.all, codecs)
        self._layout = layout
        self._tiers = tiers
        self._codecs = tuple(codecs)
        self._write_order = _get_write_order(tiers.all)
        self._pending = PendingPages()
        self._on_pending = on_pending

    @property
    def lowest_codec(self) -> Codec:
        """The codec of the lowest tier, which decides what rows every reader gets."""
        return self._codecs[-1]

    def encode(self, page: ExpectedPage, rows: Tensor) -> tuple[Tensor, Blob | None]:
        """Encode a page for the lowest tier and return its rows as every reader gets them.

        The blob is None when encoding does not change the rows.
        """
        if self._codecs[-1] is Codec.RAW:
            return rows, None
        blob = encode_page(self._layout, page.key, page.sequence, rows, self._codecs[-1])
        return decode_page(self._layout, parse_header(blob), blob), blob

    def write(
        self,
        page: ExpectedPage,
        rows: Tensor,
        blob: Blob | None = None,
        *,
        epoch: int | None = None,
    ) -> None:
        """Put a page into the lowest tier that accepts it, and copies into the tiers above.

        `rows` and `blob` are results of `encode`. Raises StaleWriterError, or the lowest tier's error
        when no tier accepts the page.
        """
        blob = blob or encode_page(self._layout, page.key, page.sequence, rows)
        depth = self._put_first(page.key, blob, epoch, self._write_order)
        self._record_depth(page, depth, epoch)
        self.copy_above(depth, [(page.key, blob, rows)])

    def copy_above(self, depth: int, pages: Iterable[tuple[PageKey, Blob, Tensor]]) -> None:
        """Copy pages of the tier at `depth`, with their rows, into the tiers above it.

        Each tier gets the form of its codec. Refused copies are only counted.
        """
        if depth == 0:
            return
        for key, blob, rows in pages:
            raw = self._to_raw(blob, rows) if Codec.RAW in self._codecs[:depth] else blob
            for above in range(depth):
                self._put_copy(above, key, raw if self._codecs[above] is Codec.RAW else blob)

    def delete(self, keys: Sequence[PageKey], epoch: int | None = None) -> None:
        """Delete pages from every tier. Raises the first error after all tiers were tried."""
        self._pending.discard(keys)
        self._delete_from(range(self._tiers.bottom, -1, -1), keys, epoch)

    def delete_copies(self, keys: Sequence[PageKey]) -> None:
        """Delete pages from the tiers above the lowest, except pending ones."""
        self._delete_from(
            range(self._tiers.bottom), [key for key in keys if key not in self._pending], None
        )

    def flush(self, groups: Sequence[Collection[str]]) -> list[bool]:
        """Flush each tier that holds pages of these sessions once.

        Returns for each group of sessions whether all its pages are durable.
        """
        # Selected before the flush, which covers no page that is written meanwhile.
        pending = [self._pending.select(sessions) for sessions in groups]
        depths = {page.depth for pages in pending for page in pages}
        flushed = {depth for depth in depths | {self._tiers.bottom} if self._is_flushed(depth)}
        return [
            self._tiers.lowest.durable
            and self._tiers.bottom in flushed
            and all(page.durable and page.depth in flushed for page in pages)
            for pages in pending
        ]

    def sync(self) -> None:
        """Make the deletions of all durable tiers durable. Raises a tier's error."""
        for depth, tier in enumerate(self._tiers.all):
            if tier.durable:
                self._tiers.flush(depth)

    # Pending pages

    def add_pending(self, headers: Mapping[int, PageHeader], depth: int) -> None:
        """Record versions in the tier at `depth` that an earlier process did not flush below."""
        durable = self._tiers.all[depth].durable
        for header in headers.values():
            page = ExpectedPage(header.key, header.sequence)
            self._pending.add(PendingPage(page, depth, durable, header.epoch))
        if headers:
            self._on_pending()

    def flush_pending(self, sessions: Collection[str] | None = None) -> list[str]:
        """Move the pending pages of some sessions, or of all, to the lowest tier.

        Returns the sessions that another writer took over; their pending pages are discarded.
        """
        stale = []
        for pending in self._pending.select(sessions):
            try:
                self._move_down(pending)
            except StaleWriterError:
                self._pending.discard([pending.page.key])
                with suppress(TierError):
                    self._tiers.all[pending.depth].delete([pending.page.key])
                stale.append(pending.page.key.session)
            except TierError:
                continue
            except PageError:  # The page is unreadable, so there is nothing to move.
                self._pending.discard([pending.page.key])
        return stale

    def discard_pending(self, session: str) -> None:
        """Stop moving the session's pending pages to the lowest tier."""
        self._pending.discard([pending.page.key for pending in self._pending.select([session])])

    def has_pending(self, sessions: Collection[str] | None = None) -> bool:
        """Return whether pages of some sessions, or of any, are not in the lowest tier yet."""
        return bool(self._pending.select(sessions))

    def get_depth(self, key: PageKey) -> int:
        """Depth of the tier that must hold a page: the lowest, or its own while it is pending."""
        return self._pending.get_depth(key, self._tiers.bottom)

    def pending_keys(self) -> set[PageKey]:
        """Keys of all pending pages."""
        return {pending.page.key for pending in self._pending.select()}

    def count_pending(self) -> tuple[int, int]:
        """Count the pages that are not in the lowest tier yet, and those of them in memory alone."""
        pending = self._pending.select()
        return len(pending), sum(not page.durable for page in pending)

    def has_undurable(self, sessions: Collection[str] | None = None) -> bool:
        """Return whether pages of some sessions, or of any, are held in memory alone."""
        return any(not pending.durable for pending in self._pending.select(sessions))

    # Internals

    def _is_flushed(self, depth: int) -> bool:
        try:
            self._tiers.flush(depth)
        except TierError:
            return False
        return True

    def _put_first(self, key: PageKey, blob: Blob, epoch: int | None, depths: Sequence[int]) -> int:
        """Put a page into the first of `depths` that accepts it; return that depth.

        Raises the first refusal.
        """
        refusal: TierError | None = None
        for depth in depths:
            try:
                self._tiers.put(depth, key, blob, epoch)
            except StaleWriterError:
                raise
            except TierError as error:
                refusal = refusal or error
            else:
                return depth
        assert refusal is not None, "there is at least one tier to write to"
        raise refusal

    def _record_depth(self, page: ExpectedPage, depth: int, epoch: int | None) -> None:
        if depth == self._tiers.bottom:
            self._pending.discard([page.key])
        else:
            self._pending.add(PendingPage(page, depth, self._tiers.all[depth].durable, epoch))
            self._on_pending()

    def _move_down(self, pending: PendingPage) -> None:
        key = pending.page.key
        blob = self._tiers.all[pending.depth].get([key])[0]
        if blob is None or parse_header(blob).sequence != pending.page.sequence:
            self._pending.discard([key])
            return
        preferred = self._write_order[: self._write_order.index(pending.depth)]
        depth = self._put_first(key, blob, pending.epoch, preferred)
        self._record_depth(pending.page, depth, pending.epoch)
        if not pending.durable:  # Memory may drop the page from now on.
            self._tiers.put(pending.depth, key, blob, pending.epoch, backed=True)

    def _delete_from(
        self, depths: Sequence[int], keys: Sequence[PageKey], epoch: int | None
    ) -> None:
        failure: TierError | None = None
        for depth in depths:
            try:
                self._tiers.delete(depth, keys, epoch)
            except TierError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _put_copy(self, depth: int, key: PageKey, blob: Blob) -> None:
        try:
            self._tiers.put(depth, key, blob, None, backed=True)
        except TierError:
            # The tier below has the page. An older copy up here would only occupy memory.
            self._tiers.count(depth, refused_pages=1)
            with suppress(TierError):
                self._tiers.all[depth].delete([key])

    def _to_raw(self, blob: Blob, rows: Tensor) -> Blob:
        header = parse_header(blob)
        if header.codec == Codec.RAW:
            return blob
        return encode_page(self._layout, header.key, header.sequence, rows)


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
