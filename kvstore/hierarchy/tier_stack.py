"""The tiers of one store as a whole: written from the lowest up (`placement`), read from the fastest down.

A page is read by the codec in its header, whatever is configured now: one that was written as RAW stays exact.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torch import Tensor

from kvstore.errors import KvStoreError, LostPageError, PageError, TierError, TierSettingsError
from kvstore.format.codec import Codec, decode_page
from kvstore.format.page import Blob, PageHeader, PageKey, PageLayout, parse_header, require_layout
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.metered import MeteredTiers
from kvstore.hierarchy.placement import PagePlacement
from kvstore.tiers.base import Tier

_Page = tuple[PageHeader, Blob]


class TierStack:
    """Reads pages from `tiers`, given fastest first, and says what these hold. Safe to call from several threads.

    `codecs`: one per tier, RAW for all when not given; they and `on_owed` belong to the placement. Raises
    TierSettingsError, and closes the tiers then.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[Tier],
        codecs: Sequence[Codec] | None,
        epochs: WriterEpochs,
        on_owed: Callable[[], None],
    ) -> None:
        self._layout = layout
        self.tiers = MeteredTiers(tiers, epochs)
        try:
            self.placement = PagePlacement(
                layout, self.tiers, codecs or [Codec.RAW] * len(tiers), on_owed
            )
        except TierSettingsError:
            self.tiers.close()
            raise

    def read(self, pages: Sequence[ExpectedPage], *, promote: bool = True) -> list[Tensor]:
        """The rows of the pages, in their order, each from the fastest tier that has the expected version.

        What came from a lower tier is put into the ones above it, if `promote`. Raises for a page that no tier has:
        the lowest tier's TierError if it did not answer, a PageError of a copy that cannot be used, LostPageError.
        """
        found: dict[PageKey, Tensor] = {}
        failures: dict[PageKey, KvStoreError] = {}
        missing = list(pages)
        for depth in range(len(self.tiers.all)):
            read, failed = self._read_from(depth, missing)
            failures |= failed
            found |= {key: decode_page(self._layout, *page) for key, page in read.items()}
            if promote:
                self.placement.keep_above(
                    depth, [(key, blob, found[key]) for key, (_, blob) in read.items()]
                )
            missing = [page for page in missing if page.key not in found]
            if not missing:
                break
        for page in missing:
            lost = LostPageError(f"no tier holds {page}; its rows must be computed again")
            raise failures.get(page.key, lost)
        return [found[page.key] for page in pages]

    def verified(self, page: ExpectedPage) -> tuple[Tensor, bool]:
        """The rows of a page and whether the tier that has to keep it gave them, not a copy above it.

        Raises as `read`, and that tier's error if it did not answer.
        """
        found, failed = self._read_from(self.placement.depth_of(page.key), [page])
        if page.key in found:
            return decode_page(self._layout, *found[page.key]), True
        if isinstance(error := failed.get(page.key), TierError):
            raise error
        return self.read([page], promote=False)[0], False

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
        newest = self._stored(self.tiers.bottom, session)
        for depth, tier in enumerate(self.tiers.all[:-1]):
            if not tier.durable:
                continue
            with suppress(TierError):
                above = self._stored(depth, session)
                known = max((header.epoch for header in above.values()), default=0)
                if not self.tiers.lowest.shared or (epoch is not None and known >= epoch - 1):
                    newer = {
                        index: header
                        for index, header in above.items()
                        if index not in newest or newest[index].sequence < header.sequence
                    }
                    self.placement.owe(newer, depth)
                    newest |= newer
        return newest

    def stored_keys(
        self, session: str, *, above: bool = False, must_answer: bool = True
    ) -> set[PageKey]:
        """The session's pages in all tiers, or in those above the lowest.

        Raises what a tier failed with if it `must_answer`; else its pages are left out.
        """
        keys: set[PageKey] = set()
        for tier in self.tiers.all[:-1] if above else self.tiers.all:
            try:
                keys |= {header.key for header in tier.stored(session)}
            except TierError:
                if must_answer:
                    raise
        return keys

    def newest_sequence(self, key: PageKey) -> int:
        """The largest number of any version of a page that a tier holds; -1 when none does. Raises a tier's error."""
        headers = (header for tier in self.tiers.all for header in tier.stored(key.session))
        return max((header.sequence for header in headers if header.key == key), default=-1)

    def all_headers(self) -> Iterator[PageHeader]:
        """Headers of the durable tiers that only this process writes, and of the lowest if it is none that others do.

        Raises ForeignPageError, what a tier failed with.
        """
        for tier in self.tiers.all:
            if not tier.shared and (tier.durable or tier is self.tiers.lowest):
                for header in tier.stored():
                    self._require_ours(header)
                    yield header

    def _stored(self, depth: int, session: str) -> dict[int, PageHeader]:
        headers = self.tiers.stored(depth, session)
        for header in headers.values():
            self._require_ours(header)
        return headers

    def _require_ours(self, header: PageHeader) -> None:
        """Raise ForeignPageError for another layout's page; one without tokens is a page whose header broke."""
        if header.valid_tokens:
            require_layout(header, self._layout)

    def _read_from(
        self,
        depth: int,
        pages: Sequence[ExpectedPage],
    ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:
        """What a tier has of some pages, and why those are not to be had that it should have."""
        try:
            found = self._expected(pages, self.tiers.get(depth, [page.key for page in pages]))
        except PageError as error:
            return (
                self._read_one_by_one(depth, pages)
                if len(pages) > 1
                else ({}, {pages[0].key: error})
            )
        except TierError as error:
            # A copy above the lowest tier is a convenience, unless it is the only one.
            only_here = self.placement.owed_keys()
            return {}, {
                page.key: error
                for page in pages
                if depth == self.tiers.bottom or page.key in only_here
            }
        read_bytes = sum(len(blob) for _, blob in found.values())
        self.tiers.count(
            depth, hits=len(found), misses=len(pages) - len(found), read_bytes=read_bytes
        )
        return found, {}

    def _read_one_by_one(
        self,
        depth: int,
        pages: Sequence[ExpectedPage],
    ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:
        found: dict[PageKey, _Page] = {}
        failures: dict[PageKey, KvStoreError] = {}
        for page in pages:
            one, failed = self._read_from(depth, [page])
            found |= one
            failures |= failed
        return found, failures

    def _expected(
        self, pages: Sequence[ExpectedPage], blobs: Sequence[Blob | None]
    ) -> dict[PageKey, _Page]:
        """Of what a tier gave, the versions that may be read."""
        given = [
            (page, parse_header(blob), blob)
            for page, blob in zip(pages, blobs, strict=True)
            if blob is not None
        ]
        return {
            page.key: (header, blob)
            for page, header, blob in given
            if page.is_met_by(header, self._layout)
        }
