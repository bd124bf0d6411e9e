"""Where pages are put: in the lowest tier and, as copies, in those above it.

A page's rows are the same in every tier. The lowest tier's codec decides how exact they are, once, when the page is
finished; a tier above may hold the decoded rows as RAW (read faster) or the encoded page. What was decoded from INT8 is
never encoded as INT8 again.

What the lowest tier does not take goes to the next durable one, or into memory as the last resort, and is owed to it.
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
    """Encodes pages, puts them into tiers and deletes them. One thread at a time writes and deletes.

    `codecs`: one per tier. None may be less exact than the one below it, or what a reader gets would depend on the
    tier; raises TierSettingsError then. `on_owed` is called when a page did not get where it belongs.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: MeteredTiers,
        codecs: Sequence[Codec],
        on_owed: Callable[[], None],
    ) -> None:
        _require_order(tiers.all, codecs)
        self._layout = layout
        self._tiers = tiers
        self._codecs = tuple(codecs)
        self._places = _places(tiers.all)
        self._owed = PendingPages()
        self._on_owed = on_owed

    def settled(self, page: ExpectedPage, rows: Tensor) -> tuple[Tensor, Blob | None]:
        """The rows as every reader of the page shall get them, and the page if encoding changed them.

        Only a finished page is changed: an unfinished one will be read to be finished, and its rows must not be
        quantised twice.
        """
        if self._codecs[-1] is Codec.RAW or rows.shape[3] < self._layout.page_tokens:
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
        cut: bool = False,
    ) -> None:
        """Put what `settled` made of a page into the lowest tier that takes it and those above.

        `cut`: versions before it may have rows that must not be read again, so no tier below may keep such a one.
        Raises StaleWriterError, and the lowest tier's error when none takes the page or a cut version stays.
        """
        blob = blob or encode_page(self._layout, page.key, page.sequence, rows)
        depth = self._put_somewhere(page.key, blob, epoch, self._places)
        self._note_place(page, depth, epoch)
        self.keep_above(depth, [(page.key, blob, rows)])
        if cut:
            for below in range(depth + 1, self._tiers.bottom + 1):
                if self._has_more(below, page.key, rows.shape[3]):
                    self._tiers.delete(below, [page.key], epoch)

    def keep_above(self, depth: int, pages: Iterable[tuple[PageKey, Blob, Tensor]]) -> None:
        """Copies of pages of the tier at `depth`, with their rows, for the tiers above it: each gets its own form."""
        if depth == 0:
            return
        for key, blob, rows in pages:
            exact = self._as_raw(blob, rows) if Codec.RAW in self._codecs[:depth] else blob
            for above in range(depth):
                self._keep_copy(above, key, exact if self._codecs[above] is Codec.RAW else blob)

    def delete(self, keys: Sequence[PageKey], epoch: int | None = None) -> None:
        """Forget pages in every tier. Raises the first error when some tier failed; the others have done it."""
        self._owed.discard(keys)
        self._delete_from(range(self._tiers.bottom, -1, -1), keys, epoch)

    def forget_copies(self, keys: Sequence[PageKey]) -> None:
        """Drop pages from the tiers above the lowest, but for those that it is still to get."""
        self._delete_from(
            range(self._tiers.bottom), [key for key in keys if key not in self._owed], None
        )

    def flush(self, sessions: Collection[str]) -> bool:
        """Whether all that these sessions' pages are in is durable now."""
        owed = self._owed.of(sessions)
        try:
            for depth in {self._tiers.bottom} | {one.depth for one in owed}:
                self._tiers.all[depth].flush()
        except TierError:
            return False
        return self._tiers.lowest.durable and all(one.durable for one in owed)

    # What is owed

    def owe(self, headers: Mapping[int, PageHeader], depth: int) -> None:
        """The tier at `depth` has versions that the lowest one did not get before an earlier process ended."""
        for header in headers.values():
            page = ExpectedPage(header.key, header.sequence)
            self._owed.add(PendingPage(page, depth, self._tiers.all[depth].durable, header.epoch))
        if headers:
            self._on_owed()

    def settle_owed(self, sessions: Collection[str] | None = None) -> list[str]:
        """Bring owed pages, of some sessions or all, where they belong.

        Returns sessions that another writer has taken over; what they owed is dropped.
        """
        stale = []
        for owed in self._owed.of(sessions):
            try:
                self._bring(owed)
            except StaleWriterError:
                self._owed.discard([owed.page.key])
                with suppress(TierError):
                    self._tiers.all[owed.depth].delete([owed.page.key])
                stale.append(owed.page.key.session)
            except TierError:
                continue
            except PageError:  # nobody can read it either
                self._owed.discard([owed.page.key])
        return stale

    def forget_owed(self, session: str) -> None:
        """What is owed of the session's pages will not be brought to the lowest tier any more."""
        self._owed.discard([owed.page.key for owed in self._owed.of([session])])

    def owes(self, sessions: Collection[str] | None = None) -> bool:
        """Whether pages, of some sessions or any, are not where they belong."""
        return bool(self._owed.of(sessions))

    def depth_of(self, key: PageKey) -> int:
        """The tier that has to keep a page: the lowest, or the one that has it until that takes it."""
        return self._owed.depth(key, self._tiers.bottom)

    def owed_keys(self) -> set[PageKey]:
        """The pages that the lowest tier is to get yet."""
        return {owed.page.key for owed in self._owed.of()}

    def undurable(self, sessions: Collection[str] | None = None) -> bool:
        """Whether pages, of some sessions or any, are held in memory alone though a tier below should have them."""
        return any(not owed.durable for owed in self._owed.of(sessions))

    # Inside

    def _put_somewhere(
        self, key: PageKey, blob: Blob, epoch: int | None, places: Sequence[int]
    ) -> int:
        """Put a page into the first of `places` that takes it, which is returned. Raises the first refusal."""
        refusal: TierError | None = None
        for depth in places:
            try:
                self._tiers.put(depth, key, blob, epoch)
            except StaleWriterError:
                raise
            except TierError as error:
                refusal = refusal or error
            else:
                return depth
        assert refusal is not None, "there is at least one place"
        raise refusal

    def _note_place(self, page: ExpectedPage, depth: int, epoch: int | None) -> None:
        if depth == self._tiers.bottom:
            self._owed.discard([page.key])
        else:
            self._owed.add(PendingPage(page, depth, self._tiers.all[depth].durable, epoch))
            self._on_owed()

    def _bring(self, owed: PendingPage) -> None:
        key = owed.page.key
        blob = self._tiers.all[owed.depth].get([key])[0]
        if blob is None or parse_header(blob).sequence != owed.page.sequence:
            self._owed.discard([key])
            return
        better = self._places[: self._places.index(owed.depth)]
        depth = self._put_somewhere(key, blob, owed.epoch, better)
        self._note_place(owed.page, depth, owed.epoch)
        if not owed.durable:  # memory may give it up now
            self._tiers.put(owed.depth, key, blob, owed.epoch, backed=True)

    def _has_more(self, depth: int, key: PageKey, tokens: int) -> bool:
        """Whether a tier's version of a page may have more rows than `tokens`. Raises a tier's error."""
        try:
            blob = self._tiers.all[depth].get([key])[0]
        except PageError:
            return True
        return blob is not None and parse_header(blob).valid_tokens > tokens

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

    def _keep_copy(self, depth: int, key: PageKey, blob: Blob) -> None:
        try:
            self._tiers.put(depth, key, blob, None, backed=True)
        except TierError:
            # The tier below has the page. An older copy up here would only take room.
            self._tiers.count(depth, refused_pages=1)
            with suppress(TierError):
                self._tiers.all[depth].delete([key])

    def _as_raw(self, blob: Blob, rows: Tensor) -> Blob:
        header = parse_header(blob)
        if header.codec == Codec.RAW:
            return blob
        return encode_page(self._layout, header.key, header.sequence, rows)


def _places(tiers: Sequence[Tier]) -> tuple[int, ...]:
    """Where a page goes, by preference: the lowest tier, the durable ones above it from below, then memory."""
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
            f"no tier may keep rows less exactly than the one below it, got {', '.join(names)}; "
            "give the lowest tier INT8 too"
        )
