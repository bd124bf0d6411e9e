"""Files that fail on request, and copies of them as a crash of the machine may leave them."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.errors import TierFailedError
from kvstore.format.page import Blob, PageHeader, PageId, RecordKind
from kvstore.tiers.nvme.segment import SegmentFile, scan_segment
from kvstore.tiers.nvme.tier import NvmeTier


class FaultyTier(NvmeTier):
    """Files that refuse all calls or all writes, but, as Redis, keep what they acknowledged."""

    fails = ""

    def get(self, ids: Sequence[PageId]) -> list[Blob | None]:
        self._require_readable()
        return super().get(ids)

    def put(self, pages: Sequence[tuple[PageId, Blob]], *, backed: bool = False) -> None:
        self._require_writable()
        super().put(pages, backed=backed)

    def contains(self, ids: Sequence[PageId]) -> list[bool]:
        self._require_readable()
        return super().contains(ids)

    def delete(self, ids: Sequence[PageId]) -> None:
        self._require_writable()
        super().delete(ids)

    def stored(self) -> Iterator[PageHeader]:
        self._require_readable()
        return super().stored()

    def list_ids(self, written_before: int) -> list[PageId]:
        self._require_readable()
        return super().list_ids(written_before)

    def _require_readable(self) -> None:
        if self.fails == "all":
            raise TierFailedError("the device does not answer")

    def _require_writable(self) -> None:
        if self.fails:
            raise TierFailedError("the device accepts nothing")


def listing(directory: Path) -> dict[str, int]:
    sizes = {}
    for path in directory.iterdir():
        with suppress(FileNotFoundError):
            sizes[path.name] = path.stat().st_size
    return sizes


def snapshot(source: Path, target: Path) -> None:
    """Copy a directory at one moment, although a thread may be compacting it."""
    while True:
        before = listing(source)
        with suppress(shutil.Error):
            shutil.copytree(source, target)
        if before == listing(source) == listing(target):
            return
        shutil.rmtree(target)


def tear(directory: Path, share: float) -> None:
    """Truncate the newest segment behind its last sync marker, as a crash of the machine may."""
    newest = SegmentFile(max(directory.glob("segment-*.kv")), 0)
    synced = max(
        (r.end for r in scan_segment(newest).records if r.header.kind is RecordKind.SYNC), default=0
    )
    newest.truncate(synced + int(share * (newest.end - synced)))
