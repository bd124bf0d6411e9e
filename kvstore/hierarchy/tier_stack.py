"""All tiers of a store: written from the lowest up (`placement`), read from the fastest down.

A page is decoded by the codec in its header, independent of the configured one: a page that was
written as RAW stays exact.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from kvstore.errors import (
    KvStoreError,
    MissingPageError,
    PageError,
    TierError,
    TierSettingsError,
)
from kvstore.format.codec import Codec, decode_page
from kvstore.format.page import Blob, PageHeader, PageKey, PageLayout, parse_header, require_layout
from kvstore.format.page_table import ExpectedPage
from kvstore.hierarchy.epochs import WriterEpochs
from kvstore.hierarchy.metered import CallObserver, MeteredTiers
from kvstore.hierarchy.placement import PagePlacement
from kvstore.tiers.base import Tier

_Page = tuple[PageHeader, Blob]


@dataclass(frozen=True, eq=False)
class _Read:
    """Rows of a page, and the depth of the tier that had it."""

    depth: int
    rows: Tensor


class TierStack:
    """Reads pages from `tiers`, fastest first, and lists their contents.

    Safe to call from several threads. `codecs` has one entry per tier, RAW for all by default; see
    `PagePlacement` for `codecs` and `on_pending`. Raises TierSettingsError after closing the tiers.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[Tier],
        codecs: Sequence[Codec] | None,
        epochs: WriterEpochs,
        on_pending: Callable[[], None],
        on_call: CallObserver | None = None,
    ) -> None:
        self._layout = layout
        self.tiers = MeteredTiers(tiers, epochs, on_call)
        try:
            self.placement = PagePlacement(
                layout, self.tiers, codecs or [Codec.RAW] * len(tiers), on_pending
            )
        except TierSettingsError:
            self.tiers.close()
            raise

    def read(self, pages: Sequence[ExpectedPage], *, promote: bool = True) -> list[Tensor]:
        """Read the rows of pages, each from the fastest tier that has the expected version.

        Returns tensors `[n_layers, 2, n_kv_heads, valid_tokens, head_dim]` in the order of `pages`.
        With `promote`, pages from a lower tier are copied into the tiers above it. Raises for a
        page that no tier can give: the lowest tier's TierError when it did not answer, the
        PageError of an unusable copy, else MissingPageError.
        """
        found = self._read(pages, promote=promote)
        return [found[page.key].rows for page in pages]

    def hold(self, pages: Sequence[ExpectedPage]) -> list[Tensor]:
        """Read pages as `read`, in the memory of the fastest tier where it gives views of that."""
        found = self._read(pages, promote=True)
        lower = [page for page in pages if found[page.key].depth > 0]
        copies: dict[PageKey, _Page] = {}
        if lower and not self.tiers.all[0].durable:
            blobs = self.tiers.get(0, [page.key for page in lower])
            copies = self._match_expected(lower, blobs)
        return [
            decode_page(self._layout, *copies[page.key])
            if page.key in copies
            else found[page.key].rows
            for page in pages
        ]

    def _read(self, pages: Sequence[ExpectedPage], *, promote: bool) -> dict[PageKey, _Read]:
        """Read pages as `read`."""
        rows: dict[PageKey, _Read] = {}
        failures: dict[PageKey, KvStoreError] = {}
        missing = list(pages)
        for depth in range(len(self.tiers.all)):
            read, failed = self._read_from(depth, missing)
            failures |= failed
            rows |= {
                key: _Read(depth, decode_page(self._layout, *page)) for key, page in read.items()
            }
            if promote:
                self.placement.copy_above(
                    depth, [(key, blob, rows[key].rows) for key, (_, blob) in read.items()]
                )
            missing = [page for page in missing if page.key not in rows]
            if not missing:
                break
        for page in missing:
            absent = MissingPageError(f"no tier holds {page}; its rows must be computed again")
            raise failures.get(page.key, absent)
        return rows

    def read_verified(self, page: ExpectedPage) -> tuple[Tensor, bool]:
        """Read a page; also return whether the tier that must hold it has it, not only a copy.

        Raises as `read`, and the error of that tier when it did not answer.
        """
        read, failed = self._read_from(self.placement.get_depth(page.key), [page])
        if page.key in read:
            return decode_page(self._layout, *read[page.key]), True
        if isinstance(error := failed.get(page.key), TierError):
            raise error
        return self.read([page], promote=False)[0], False

    def promote(self, pages: Sequence[ExpectedPage]) -> None:
        """Copy pages into the tiers above the one that holds them; skips unreadable pages."""
        for page in pages:
            with suppress(PageError):
                self.read([page])

    def headers(
        self, session: str, accepts: Callable[[PageHeader], bool] | None = None
    ) -> dict[int, PageHeader]:
        """Newest versions of a session's pages in the lowest and all durable tiers, by index.

        Above the lowest tier, pages that `accepts` refuses do not count, and without it none do
        when the lowest tier is shared. Raises the lowest tier's error, ForeignPageError.
        """
        newest = self._stored(self.tiers.bottom, session)
        for depth, tier in enumerate(self.tiers.all[:-1]):
            if not tier.durable or (self.tiers.lowest.shared and accepts is None):
                continue
            with suppress(TierError):
                newer = {
                    index: header
                    for index, header in self._stored(depth, session).items()
                    if (index not in newest or newest[index].sequence < header.sequence)
                    and (accepts is None or accepts(header))
                }
                self.placement.add_pending(newer, depth)
                newest |= newer
        return newest

    def stored_keys(
        self, session: str, *, above: bool = False, must_answer: bool = True
    ) -> set[PageKey]:
        """Keys of the session's pages in all tiers, or with `above` in those above the lowest.

        Raises a tier's error with `must_answer`; without it, the pages of that tier are left out.
        """
        keys: set[PageKey] = set()
        for tier in self.tiers.all[:-1] if above else self.tiers.all:
            try:
                keys |= {header.key for header in tier.stored(session)}
            except TierError:
                if must_answer:
                    raise
        return keys

    def headers_above(self, session: str) -> list[PageHeader]:
        """Headers of all copies of the session's pages above the lowest tier.

        Raises a tier's error.
        """
        return [header for tier in self.tiers.all[:-1] for header in tier.stored(session)]

    def newest_sequence(self, key: PageKey) -> int:
        """Largest sequence number of a page in any tier; -1 when none has it.

        Raises a tier's error.
        """
        headers = (header for tier in self.tiers.all for header in tier.stored(key.session))
        return max((header.sequence for header in headers if header.key == key), default=-1)

    def session_headers(self) -> Iterator[PageHeader]:
        """One header per session and tier, of the unshared tiers that are durable or lowest.

        Raises ForeignPageError, or a tier's error.
        """
        for tier in self.tiers.all:
            if not tier.shared and (tier.durable or tier is self.tiers.lowest):
                for header in tier.session_headers():
                    self._require_ours(header)
                    yield header

    def _stored(self, depth: int, session: str) -> dict[int, PageHeader]:
        headers = self.tiers.stored(depth, session)
        for header in headers.values():
            self._require_ours(header)
        return headers

    def _require_ours(self, header: PageHeader) -> None:
        """Raise ForeignPageError for another layout's page; no tokens means a broken header."""
        if header.valid_tokens:
            require_layout(header, self._layout)

    def _read_from(
        self,
        depth: int,
        pages: Sequence[ExpectedPage],
    ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:
        """Read pages from one tier; also return the errors of pages that it should have."""
        try:
            read = self._match_expected(pages, self.tiers.get(depth, [page.key for page in pages]))
        except PageError as error:
            return (
                self._read_one_by_one(depth, pages)
                if len(pages) > 1
                else ({}, {pages[0].key: error})
            )
        except TierError as error:
            # A copy above the lowest tier is optional, unless it is the only one.
            only_here = self.placement.pending_keys()
            return {}, {
                page.key: error
                for page in pages
                if depth == self.tiers.bottom or page.key in only_here
            }
        read_bytes = sum(len(blob) for _, blob in read.values())
        self.tiers.count(
            depth, hits=len(read), misses=len(pages) - len(read), read_bytes=read_bytes
        )
        return read, {}

    def _read_one_by_one(
        self,
        depth: int,
        pages: Sequence[ExpectedPage],
    ) -> tuple[dict[PageKey, _Page], dict[PageKey, KvStoreError]]:
        pages_read: dict[PageKey, _Page] = {}
        failures: dict[PageKey, KvStoreError] = {}
        for page in pages:
            read, failed = self._read_from(depth, [page])
            pages_read |= read
            failures |= failed
        return pages_read, failures

    def _match_expected(
        self, pages: Sequence[ExpectedPage], blobs: Sequence[Blob | None]
    ) -> dict[PageKey, _Page]:
        """Parse the blobs of a tier and keep the expected versions."""
        parsed = [
            (page, parse_header(blob), blob)
            for page, blob in zip(pages, blobs, strict=True)
            if blob is not None
        ]
        return {
            page.key: (header, blob)
            for page, header, blob in parsed
            if page.matches(header, self._layout)
        }
