"""All tiers of a store: written from the lowest up (`placement`), read from the fastest down.

Behind the lowest tier a bucket may have pages that were not used for a while (`cold`).

A page is decoded by the codec in its header, independent of the configured one: a page that was
written as RAW stays exact.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
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
from kvstore.format.encryption import PageKeys
from kvstore.format.page import Blob, PageId, PageLayout, parse_header
from kvstore.hierarchy.cold_storage import ColdStorage
from kvstore.hierarchy.metered import CallObserver, MeteredTiers
from kvstore.hierarchy.page_holders import PageHolders
from kvstore.hierarchy.placement import PagePlacement
from kvstore.tiers.base import Tier
from kvstore.tiers.bucket.tier import BucketTier

# Pages of the bucket that are in memory at a time while a session's are fetched.
_FETCHED_PAGES = 16


@dataclass(frozen=True, eq=False)
class _Read:
    """A page as a tier had it, but plain, its rows, and the tier's depth."""

    depth: int
    blob: Blob
    rows: Tensor


class TierStack:
    """Reads pages from `tiers`, fastest first, and finds which there are.

    Safe to call from several threads. `codecs` has one entry per tier, RAW for all by default; see
    `PagePlacement` for `codecs` and `on_pending`, and `ColdStorage` for `bucket` and `cold_after_seconds`.
    Raises TierSettingsError after closing the tiers.
    """

    def __init__(
        self,
        layout: PageLayout,
        tiers: Sequence[Tier],
        codecs: Sequence[Codec] | None,
        on_pending: Callable[[], None],
        on_call: CallObserver | None,
        bucket: BucketTier | None,
        cold_after_seconds: float,
    ) -> None:
        self._layout = layout
        self.keys = PageKeys()
        self.tiers = MeteredTiers(tiers, on_call, bucket)
        self.cold = ColdStorage(self.tiers, cold_after_seconds)
        try:
            self.placement = PagePlacement(
                layout,
                self.tiers,
                codecs or [Codec.RAW] * len(tiers),
                self.keys,
                on_pending,
                self.cold.condemn,
            )
        except TierSettingsError:
            self.tiers.close()
            raise

    def read(self, ids: Sequence[PageId], *, promote: bool = True) -> list[Tensor]:
        """Read the rows of pages, each from the fastest tier that has it.

        Returns tensors `[page_layers, parts, n_kv_heads, page_tokens, head_dim]` in the order of
        `ids`. With `promote`, pages from a lower tier are copied into the tiers above it. Raises for
        a page that no tier can give: the lowest tier's TierError when it did not answer, the
        PageError of an unusable copy, else MissingPageError.
        """
        found = self._read(ids, promote=promote)
        return [found[page_id].rows for page_id in ids]

    def hold(self, ids: Sequence[PageId]) -> list[Tensor]:
        """Read pages as `read`, in the memory of the fastest tier where it gives views of that."""
        found = self._read(ids, promote=True)
        lower = [page_id for page_id in ids if found[page_id].depth > 0]
        if lower and not self.tiers.all[0].durable:
            found |= self._decode(0, lower, self.tiers.get(0, lower))
        return [found[page_id].rows for page_id in ids]

    def read_verified(self, page_id: PageId) -> tuple[Tensor, bool]:
        """Read a page; also return whether the tier that must hold it has it, not only a copy.

        That of a page in the bucket is the bucket. Raises as `read`, and the error of that tier when it
        did not answer.
        """
        self.cold.touch([page_id])
        read, failed = self._read_from(self.placement.get_depth(page_id), [page_id])
        if page_id in read:
            return read[page_id].rows, True
        if isinstance(error := failed.get(page_id), TierError):
            raise error
        if self.cold.knows(page_id):
            read, _ = self._read_from(self.tiers.cold, [page_id])
            if page_id in read:
                self._copy_up(self.tiers.cold, read, promote=False)
                return read[page_id].rows, True
        return self.read([page_id], promote=False)[0], False

    def promote(self, ids: Sequence[PageId]) -> None:
        """Copy pages into the tiers above the one that holds them; skips unreadable pages."""
        for page_id in ids:
            with suppress(PageError):
                self.read([page_id])

    def fetch_cold(self, ids: Sequence[PageId], holders: PageHolders | None = None) -> None:
        """Copy pages that lie in the bucket alone into the lowest tier, many at once.

        `holders`: of pages that the caller does not hold. Each is held while it is copied, and not while the
        bucket is waited for: what is deleted meanwhile is not copied.
        Skips those that cannot be read: whoever reads them learns why.
        """
        cold = self._select_cold(ids)
        for first in range(0, len(cold), _FETCHED_PAGES):
            # Again: whoever reads them meanwhile has them copied as well.
            batch = self._select_cold(cold[first : first + _FETCHED_PAGES])
            with suppress(KvStoreError):
                read, _ = self._read_from(self.tiers.cold, batch)
                with nullcontext() if holders is None else holders.held(read.keys()):
                    still = {id: each for id, each in read.items() if self.cold.knows(id)}
                    self._copy_up(self.tiers.cold, still, promote=False)

    def has_cold(self, ids: Sequence[PageId]) -> bool:
        """Return whether some of the pages lie in the bucket alone, as far as it is known."""
        return bool(self._select_cold(ids))

    def find(self, ids: Sequence[PageId], *, ask: bool = False) -> set[PageId]:
        """Find those of the pages that some tier has.

        One that only a tier above the lowest has is pending from now on. `ask`: have the bucket asked
        for pages that no tier is known to have; else this sends it nothing. Raises the lowest tier's
        error, and that of a bucket that does not answer and was never listed.
        """
        found = set[PageId]()
        for depth in range(self.tiers.bottom, -1, -1):
            missing = [page_id for page_id in ids if page_id not in found]
            if not missing:
                break
            try:
                has = self.tiers.contains(depth, missing)
            except TierError:
                if depth == self.tiers.bottom:
                    raise
                continue
            here = [page_id for page_id, is_here in zip(missing, has, strict=True) if is_here]
            if depth < self.tiers.bottom:
                only_here = [page_id for page_id in here if not self.cold.knows(page_id)]
                self.placement.add_pending(only_here, depth)
            found.update(here)
        found.update(page_id for page_id in ids if self.cold.knows(page_id))
        if ask:
            found |= self.cold.find([page_id for page_id in ids if page_id not in found])
        return found

    def _read(self, ids: Sequence[PageId], *, promote: bool) -> dict[PageId, _Read]:
        """Read pages as `read`. What the bucket had is copied into the lowest tier in any case."""
        self.cold.touch(ids)
        found: dict[PageId, _Read] = {}
        failures: dict[PageId, KvStoreError] = {}
        missing = list(ids)
        for depth in range(len(self.tiers.all)):
            read, failed = self._read_from(depth, missing)
            failures |= failed
            found |= read
            self._copy_up(depth, read, promote=promote)
            missing = [page_id for page_id in missing if page_id not in found]
            if not missing:
                break
        for page_id in missing:
            absent = MissingPageError(
                f"no tier holds page {page_id.hex()}; its rows must be computed again"
            )
            raise failures.get(page_id, absent)
        return found

    def _select_cold(self, ids: Sequence[PageId]) -> list[PageId]:
        """Select the pages that lie in the bucket alone; none while the lowest tier does not answer."""
        known = [page_id for page_id in ids if self.cold.knows(page_id)]
        if not known:
            return []
        try:
            has = self.tiers.contains(self.tiers.bottom, known)
        except TierError:
            return []
        return [page_id for page_id, is_here in zip(known, has, strict=True) if not is_here]

    def _copy_up(self, depth: int, read: Mapping[PageId, _Read], *, promote: bool) -> None:
        """Copy pages of one tier into those above it; without `promote` from the bucket alone."""
        copies = [(page_id, each.blob, each.rows) for page_id, each in read.items()]
        if promote:
            self.placement.copy_above(depth, copies)
        elif depth > self.tiers.bottom:
            self.placement.copy_back(copies)

    def _read_from(
        self, depth: int, ids: Sequence[PageId]
    ) -> tuple[dict[PageId, _Read], dict[PageId, KvStoreError]]:
        """Read pages from one tier; also return the errors of pages that it should have."""
        try:
            read = self._decode(depth, ids, self.tiers.get(depth, ids))
        except PageError as error:
            return self._read_one_by_one(depth, ids) if len(ids) > 1 else ({}, {ids[0]: error})
        except TierError as error:
            # A copy above the lowest tier is optional, unless it is the only one.
            return {}, {
                page_id: error
                for page_id in ids
                if depth >= self.tiers.bottom or self.placement.is_pending(page_id)
            }
        read_bytes = sum(len(each.blob) for each in read.values())
        self.tiers.count(depth, hits=len(read), misses=len(ids) - len(read), read_bytes=read_bytes)
        return read, {}

    def _read_one_by_one(
        self, depth: int, ids: Sequence[PageId]
    ) -> tuple[dict[PageId, _Read], dict[PageId, KvStoreError]]:
        pages_read: dict[PageId, _Read] = {}
        failures: dict[PageId, KvStoreError] = {}
        for page_id in ids:
            read, failed = self._read_from(depth, [page_id])
            pages_read |= read
            failures |= failed
        return pages_read, failures

    def _decode(
        self, depth: int, ids: Sequence[PageId], blobs: Sequence[Blob | None]
    ) -> dict[PageId, _Read]:
        """Decode those of a tier's pages that it has. Raises a PageError."""
        return {
            page_id: self._open(depth, blob)
            for page_id, blob in zip(ids, blobs, strict=True)
            if blob is not None
        }

    def _open(self, depth: int, blob: Blob) -> _Read:
        """Decrypt a page if it is encrypted, and decode it. Raises a PageError."""
        header = parse_header(blob)
        if header.is_encrypted:
            blob = self.keys.decrypt(blob)
            header = parse_header(blob)
        return _Read(depth, blob, decode_page(self._layout, header, blob))
