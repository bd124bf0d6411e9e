"""Files that fail on request, and copies of them as a crash of the machine may leave them."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kvstore.errors import TierFailedError
from kvstore.format.page import Blob, PageHeader, PageKey, RecordKind
from kvstore.tiers.nvme.segment import SegmentFile, scan_segment
from kvstore.tiers.nvme.tier import NvmeTier


class FaultyTier(NvmeTier):
    """Files that refuse all calls or all writes, but, as Redis, keep what they acknowledged."""

    fails = ""

    def fence(self, session: str, epoch: int) -> None:
        self._require_writable()
        super().fence(session, epoch)

    def get(self, keys: Sequence[PageKey]) -> list[Blob | None]:
        self._require_readable()
        return super().get(keys)

    def put(
        self,
        pages: Sequence[tuple[PageKey, Blob]],
        *,
        backed: bool = False,
        epoch: int | None = None,
    ) -> None:
        self._require_writable()
        super().put(pages, backed=backed, epoch=epoch)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._require_readable()
        return super().contains(keys)

    def delete(self, keys: Sequence[PageKey], *, epoch: int | None = None) -> None:
        self._require_writable()
        super().delete(keys, epoch=epoch)

    def stored(self, session: str | None = None) -> Iterator[PageHeader]:
        self._require_readable()
        return super().stored(session)

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
