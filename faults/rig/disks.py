"""Disks that become full, with errors from the kernel itself.

A small tmpfs gives a true ENOSPC, to catalog and rows alike. If this process may not mount one, the
processes' limit on file sizes is used instead: a write beyond it fails with EFBIG.
"""

import errno
import os
import resource
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

_CHUNK = bytes(1 << 16)


class Disk(Protocol):
    """The file system of a set-up's files."""

    @property
    def kind(self) -> str:
        """Means of filling it: tmpfs or file size limit."""
        ...

    def fill(self, room: int, processes: Sequence[int]) -> None:
        """Leave about `room` bytes to the processes with these ids, until `free`."""
        ...

    def free(self, processes: Sequence[int]) -> None:
        """Free the space that `fill` took."""
        ...

    def close(self) -> None:
        """Release it; the files of a tmpfs are gone."""
        ...


def new_disk(folder: Path, size: int) -> Disk:
    """A tmpfs of `size` bytes at `folder` if one can be mounted, else a limit on file sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={size},mode=0700",
        "kvrecall-faults",
        str(folder),
    ]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    return Tmpfs(folder) if mounted else FileSizeLimit(folder)


class Tmpfs:
    """A mounted tmpfs, filled up by a file of zeros."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"

    def fill(self, room: int, processes: Sequence[int]) -> None:
        """Fill the disk up to `room` bytes."""
        with self._ballast.open("ab", buffering=0) as ballast:
            while self._free_bytes() > room:
                try:
                    ballast.write(_CHUNK[: max(1, min(len(_CHUNK), self._free_bytes() - room))])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self, processes: Sequence[int]) -> None:
        """Free the space again."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the disk."""
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def _free_bytes(self) -> int:
        status = os.statvfs(self._folder)
        return status.f_bavail * status.f_frsize


class FileSizeLimit:
    """The processes' own limit (RLIMIT_FSIZE), a little over the size of the largest file."""

    kind = "file size limit"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self, room: int, processes: Sequence[int]) -> None:
        """Fill the disk up to `room` bytes."""
        largest = max(
            (path.stat().st_size for path in self._folder.rglob("*") if path.is_file()), default=0
        )
        self._limit(largest + room, processes)

    def free(self, processes: Sequence[int]) -> None:
        """Free the space again."""
        self._limit(None, processes)

    def close(self) -> None:
        """Release the disk."""
        self.free(())

    def _limit(self, size: int | None, processes: Sequence[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(
                    process, resource.RLIMIT_FSIZE, (hard if size is None else size, hard)
                )
