"""The tiers of one store as a whole: written from the lowest up, read from the fastest down.

A page's rows are the same in every tier. The lowest tier's codec decides how exact they are, once, when the page is
finished; a tier above may hold the decoded rows as RAW (read faster) or the encoded page. What was decoded from INT8 is
never encoded as INT8 again, and a page is read by the codec in its header, whatever is configured now: one that was
written as RAW stays exact.

What the lowest tier does not take goes to the next durable one, or into memory as the last resort, and is owed to it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from kvstore.codec import Codec, decode_page, encode_page
from kvstore.errors import (
    KvStoreError,
    LostPageError,
    PageError,
    StaleWriterError,
    TierError,
    TierFailedError,
    TierSettingsError,
)
from kvstore.owed_pages import OwedPage, OwedPages
from kvstore.page import Blob, PageHeader, PageKey, PageLayout, parse_header, require_layout
from kvstore.page_table import ExpectedPage
from kvstore.tier_counters import TierCounters, TierMeter
from kvstore.tiers.base import Tier
from kvstore.writer_epochs import WriterEpochs

_Page = tuple[PageHeader, Blob]


class TierStack:
    """Encodes, writes, reads and decodes pages over `tiers`, fastest first. The lowest one is the truth.

    `codecs`: one per tier, RAW for all when not given. None may be less exact than the one below it, or what a reader
    gets would depend on the tier; raises TierSettingsError then. One thread writes and deletes, any may read.
    `on_owed` is called when a page did not get where it belongs.
    """

    def __init__(self, layout: PageLayout, tiers: Sequence[Tier], codecs: Sequence[Codec] | None = None,
                 epochs: WriterEpochs | None = None, on_owed: Callable[[], None] = lambda: None) -> None:  # fmt: skip
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
        self._meters = [TierMeter() for _ in tiers]
        self._bottom = len(tiers) - 1
        self._places = _places(tiers)
        self._owed = OwedPages()
        self._epochs = epochs or WriterEpochs()
        self._on_owed = on_owed
        self._down: TierFailedError | None = None

    @property
    def lowest(self) -> Tier:
        """The tier that decides which pages there are."""
        return self._tiers[-1]

    @property
    def memory(self) -> Tier | None:
        """The fastest tier, if it is memory above another one."""
        return None if self._tiers[0].durable or self._bottom == 0 else self._tiers[0]

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Fastest first."""
        return self._tiers

    # Writing

    def settled(self, page: ExpectedPage, rows: Tensor) -> tuple[Tensor, Blob | None]:
        """The rows as every reader of the page shall get them, and the page if encoding changed them.

        Only a finished page is changed: an unfinished one will be read to be finished, and its rows must not be
        quantised twice.
        """
        if self._codecs[-1] is Codec.RAW or rows.shape[3] < self._layout.page_tokens:
            return rows, None
        blob = encode_page(self._layout, page.key, page.sequence, rows, self._codecs[-1])
        return decode_page(self._layout, parse_header(blob), blob), blob

    def write(self, page: ExpectedPage, rows: Tensor, blob: Blob | None = None, *, epoch: int | None = None,
              cut: bool = False) -> None:  # fmt: skip
        """Put what `settled` made of a page into the lowest tier that takes it and those above.

        `cut`: versions before it may have rows that must not be read again, so no tier below may keep such a one.
        Raises StaleWriterError, and the lowest tier's error when none takes the page or a cut version stays.
        """
        blob = blob or encode_page(self._layout, page.key, page.sequence, rows)
        depth = self._put_somewhere(page.key, blob, epoch, self._places)
        self._note_place(page, depth, epoch)
        self._keep_above(depth, [(page.key, blob, rows)])
        if cut:
            for below in range(depth + 1, self._bottom + 1):
                if self._has_more(below, page.key, rows.shape[3]):
                    self._delete(below, [page.key], epoch)

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
                    self._tiers[owed.depth].delete([owed.page.key])
                stale.append(owed.page.key.session)
            except TierError:
                continue
        return stale

    def delete(self, keys: Sequence[PageKey], epoch: int | None = None) -> None:
        """Forget pages in every tier. Raises the first error when some tier failed; the others have done it."""
        self._owed.discard(keys)
        self._delete_from(range(self._bottom, -1, -1), keys, epoch)

    def forget_copies(self, keys: Sequence[PageKey]) -> None:
        """Drop pages from the tiers above the lowest, but for those that it is still to get."""
        self._delete_from(range(self._bottom), [key for key in keys if key not in self._owed], None)

    def fence(self, session: str, epoch: int) -> None:
        """Be the session's writer in every shared tier. Raises StaleWriterError and what a tier failed with."""
        self._epochs.take(session, epoch)
        for depth, tier in enumerate(self._tiers):
            if tier.shared:
                with self._meters[depth].timed("write"):
                    tier.fence(session, epoch)

    def flush(self, sessions: Collection[str]) -> bool:
        """Whether all that these sessions' pages are in is durable now."""
        owed = self._owed.of(sessions)
        try:
            for depth in {self._bottom} | {one.depth for one in owed}:
                self._tiers[depth].flush()
        except TierError:
            return False
        return self.lowest.durable and all(one.durable for one in owed)

    # What is owed

    def forget_owed(self, session: str) -> None:
        """What is owed of the session's pages will not be brought to the lowest tier any more."""
        self._owed.discard([owed.page.key for owed in self._owed.of([session])])

    def owes(self, sessions: Collection[str] | None = None) -> bool:
        """Whether pages, of some sessions or any, are not where they belong."""
        return bool(self._owed.of(sessions))

    def owed_keys(self) -> set[PageKey]:
        """The pages that the lowest tier is to get yet."""
        return {owed.page.key for owed in self._owed.of()}

    def undurable(self, sessions: Collection[str] | None = None) -> bool:
        """Whether pages, of some sessions or any, are held in memory alone though a tier below should have them."""
        return any(not owed.durable for owed in self._owed.of(sessions))

    def probe(self) -> None:
        """See whether a lowest tier that failed answers again; until then nothing is written to it."""
        if self._down is None:
            return
        with suppress(TierError):
            self.lowest.contains([PageKey("probe", 0)])
            self._down = None

    def try_again(self) -> None:
        """Write to the lowest tier again, whether it was seen to answer or not."""
        self._down = None

    # Reading

    def read(self, pages: Sequence[ExpectedPage], *, promote: bool = True) -> list[Tensor]:
        """The rows of the pages, in their order, each from the fastest tier that has the expected version.

        What came from a lower tier is put into the ones above it, if `promote`. Raises for a page that no tier has:
        the lowest tier's TierError if it did not answer, a PageError of a copy that cannot be used, LostPageError.
        """
        found: dict[PageKey, Tensor] = {}
        failures: dict[PageKey, KvStoreError] = {}
        missing = list(pages)
        for depth in range(len(self._tiers)):
            read, failed = self._read_from(depth, missing)
            failures |= failed
            found |= {key: decode_page(self._layout, *page) for key, page in read.items()}
            if promote:
                self._keep_above(depth, [(key, blob, found[key]) for key, (_, blob) in read.items()])
            missing = [page for page in missing if page.key not in found]
            if not missing:
                break
        for page in missing:
            lost = LostPageError(f"no tier holds {page}; its rows must be computed again")
            raise failures.get(page.key, lost)
        return [found[page.key] for page in pages]

    def bring_up(self, pages: Sequence[ExpectedPage]) -> None:
        """Put pages into the tiers above the one that has them, as far as they are to be had."""
        for page in pages:
            with suppress(PageError):
                self.read([page])

    def headers(self, session: str, epoch: int | None = None) -> dict[int, PageHeader]:
        """The newest version of each of a session's pages, by index, in the lowest and all durable tiers.

        Where others write the lowest tier too, pages that only this process has count only if nobody else can have
        written the session since: then the next epoch after theirs is `epoch`, the one it is opened under. Raises the
        lowest tier's error, ForeignPageError.
        """
        newest = self._stored(self._bottom, session)
        for depth, tier in enumerate(self._tiers[:-1]):
            if not tier.durable:
                continue
            with suppress(TierError):
                above = self._stored(depth, session)
                known = max((header.epoch for header in above.values()), default=0)
                if not self.lowest.shared or (epoch is not None and known >= epoch - 1):
                    self._add_newer(newest, above, depth)
        return newest

    def stored_keys(self, session: str, *, above: bool = False) -> set[PageKey]:
        """The session's pages in all tiers, or in those above the lowest. Raises what a tier failed with."""
        depths = range(self._bottom if above else self._bottom + 1)
        return {header.key for depth in depths for header in self._tiers[depth].stored(session)}

    def newest_sequence(self, key: PageKey) -> int:
        """The largest number of any version of a page that a tier holds; -1 when none does. Raises a tier's error."""
        headers = (header for tier in self._tiers for header in tier.stored(key.session))
        return max((header.sequence for header in headers if header.key == key), default=-1)

    def all_headers(self) -> Iterator[PageHeader]:
        """Headers of the durable tiers that only this process writes, and of the lowest if it is none that others do.

        Raises ForeignPageError, what a tier failed with.
        """
        for depth, tier in enumerate(self._tiers):
            if not tier.shared and (tier.durable or depth == self._bottom):
                for header in tier.stored():
                    require_layout(header, self._layout)
                    yield header

    # Books

    def counters(self) -> dict[str, TierCounters]:
        """What each tier did, by the tier's name."""
        return {tier.name: meter.counters for tier, meter in zip(self._tiers, self._meters, strict=True)}

    def used_bytes(self) -> dict[str, int]:
        """Bytes of the pages that each tier holds, by the tier's name."""
        return {tier.name: tier.used_bytes for tier in self._tiers}

    def limit_bytes(self) -> dict[str, int | None]:
        """The most bytes that each tier takes, by the tier's name."""
        return {tier.name: tier.limit_bytes for tier in self._tiers}

    def check(self) -> None:
        """Check every tier's books."""
        for tier in self._tiers:
            tier.check()

    def close(self) -> None:
        """Close every tier."""
        for tier in self._tiers:
            tier.close()

    # Inside

    def _put_somewhere(self, key: PageKey, blob: Blob, epoch: int | None, places: Sequence[int]) -> int:
        """Put a page into the first of `places` that takes it, which is returned. Raises the first refusal."""
        refusal: TierError | None = None
        for depth in places:
            try:
                self._put(depth, key, blob, epoch)
            except StaleWriterError:
                raise
            except TierError as error:
                refusal = refusal or error
            else:
                return depth
        assert refusal is not None, "there is at least one place"
        raise refusal

    def _put(self, depth: int, key: PageKey, blob: Blob, epoch: int | None, *, backed: bool = False) -> None:
        if depth == self._bottom and self._down is not None:
            raise self._down
        try:
            with self._meters[depth].timed("write"):
                self._tiers[depth].put([(key, blob)], backed=backed, epoch=self._epochs.now(key.session, epoch))
        except TierFailedError as error:
            if depth == self._bottom:
                self._down = error
            raise
        self._meters[depth].count(written_bytes=len(blob))

    def _has_more(self, depth: int, key: PageKey, tokens: int) -> bool:
        """Whether a tier's version of a page may have more rows than `tokens`. Raises a tier's error."""
        try:
            blob = self._tiers[depth].get([key])[0]
        except PageError:
            return True
        return blob is not None and parse_header(blob).valid_tokens > tokens

    def _add_newer(self, newest: dict[int, PageHeader], above: dict[int, PageHeader], depth: int) -> None:
        """Versions that the lowest tier did not get before the process ended count, and it is to get them yet."""
        for index, header in above.items():
            if index not in newest or newest[index].sequence < header.sequence:
                newest[index] = header
                self._owed.add(OwedPage(ExpectedPage(header.key, header.sequence), depth, True, header.epoch))
                self._on_owed()

    def _note_place(self, page: ExpectedPage, depth: int, epoch: int | None) -> None:
        if depth == self._bottom:
            self._owed.discard([page.key])
        else:
            self._owed.add(OwedPage(page, depth, self._tiers[depth].durable, epoch))
            self._on_owed()

    def _bring(self, owed: OwedPage) -> None:
        key = owed.page.key
        blob = self._tiers[owed.depth].get([key])[0]
        if blob is None or parse_header(blob).sequence != owed.page.sequence:
            self._owed.discard([key])
            return
        better = self._places[: self._places.index(owed.depth)]
        depth = self._put_somewhere(key, blob, owed.epoch, better)
        self._note_place(owed.page, depth, owed.epoch)
        if not owed.durable:  # memory may give it up now
            self._put(owed.depth, key, blob, owed.epoch, backed=True)

    def _delete_from(self, depths: Sequence[int], keys: Sequence[PageKey], epoch: int | None) -> None:
        failure: TierError | None = None
        for depth in depths:
            try:
                self._delete(depth, keys, epoch)
            except TierError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _delete(self, depth: int, keys: Sequence[PageKey], epoch: int | None) -> None:
        if depth == self._bottom and self._down is not None:
            raise self._down
        for session in {key.session for key in keys}:
            of_session = [key for key in keys if key.session == session]
            with self._meters[depth].timed("write"):
                self._tiers[depth].delete(of_session, epoch=self._epochs.now(session, epoch))

    def _read_from(self, depth: int, pages: Sequence[ExpectedPage],
                   ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:  # fmt: skip
        """What a tier has of some pages, and why those are not to be had that it should have."""
        try:
            with self._meters[depth].timed("read"):
                blobs = self._tiers[depth].get([page.key for page in pages])
            found = self._expected(pages, blobs)
        except PageError as error:
            return self._read_one_by_one(depth, pages) if len(pages) > 1 else ({}, {pages[0].key: error})
        except TierError as error:
            # A copy above the lowest tier is a convenience, unless it is the only one.
            return {}, {page.key: error for page in pages if depth == self._bottom or page.key in self._owed}
        read_bytes = sum(len(blob) for _, blob in found.values())
        self._meters[depth].count(hits=len(found), misses=len(pages) - len(found), read_bytes=read_bytes)
        return found, {}

    def _read_one_by_one(self, depth: int, pages: Sequence[ExpectedPage],
                         ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:  # fmt: skip
        found: dict[PageKey, _Page] = {}
        failures: dict[PageKey, KvStoreError] = {}
        for page in pages:
            one, failed = self._read_from(depth, [page])
            found |= one
            failures |= failed
        return found, failures

    def _expected(self, pages: Sequence[ExpectedPage], blobs: Sequence[Blob | None]) -> dict[PageKey, _Page]:
        """Of what a tier gave, the versions that may be read."""
        found: dict[PageKey, _Page] = {}
        for page, blob in zip(pages, blobs, strict=True):
            if blob is None:
                continue
            header = parse_header(blob)
            if page.is_met_by(header, self._layout):
                found[page.key] = (header, blob)
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
        for key, blob in copies:
            try:
                self._put(depth, key, blob, None, backed=True)
            except TierError:
                # The tier below has the page. An older copy up here would only take room.
                self._meters[depth].count(refused_pages=1)
                with suppress(TierError):
                    self._tiers[depth].delete([key])

    def _stored(self, depth: int, session: str) -> dict[int, PageHeader]:
        with self._meters[depth].timed("read"):
            headers = {header.key.index: header for header in self._tiers[depth].stored(session)}
        for header in headers.values():
            require_layout(header, self._layout)
        return headers


def _places(tiers: Sequence[Tier]) -> tuple[int, ...]:
    """Where a page goes, by preference: the lowest tier, the durable ones above it from below, then memory."""
    bottom = len(tiers) - 1
    above = range(bottom - 1, -1, -1)
    return (bottom, *(depth for depth in above if tiers[depth].durable),
            *(depth for depth in above if not tiers[depth].durable))  # fmt: skip


def _require_order(tiers: Sequence[Tier], codecs: Sequence[Codec]) -> None:
    names = [f"{tier.name}: {codec.name}" for tier, codec in zip(tiers, codecs, strict=True)]
    if list(codecs) != sorted(codecs):
        raise TierSettingsError(f"no tier may keep rows less exactly than the one below it, got {', '.join(names)}; "
                                "give the lowest tier INT8 too")  # fmt: skip
