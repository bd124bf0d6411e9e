"""Disks that become full, as the kernel has it.

A small tmpfs gives a true ENOSPC, to catalog and rows alike. Where this process may not mount one, the processes' limit
on the size of a file stands for it: a write beyond it fails with EFBIG, from the kernel as well.
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
    """Where a set-up keeps its files."""

    @property
    def kind(self) -> str:
        """How it becomes full: tmpfs or file size limit."""
        ...

    def fill(self, room: int, processes: Sequence[int]) -> None:
        """Leave about `room` bytes to the processes, by their ids, until `free`."""
        ...

    def free(self, processes: Sequence[int]) -> None:
        """Give back what `fill` took."""
        ...

    def close(self) -> None:
        """Let go of it; what is on a tmpfs is gone."""
        ...


def new_disk(folder: Path, size: int) -> Disk:
    """A tmpfs of `size` bytes at `folder` where one can be mounted, else a limit on files there."""
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
    """A mounted tmpfs, filled up by a file of nothing."""

    kind = "tmpfs"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"

    def fill(self, room: int, processes: Sequence[int]) -> None:
        with self._ballast.open("ab", buffering=0) as ballast:
            while self._left() > room:
                try:
                    ballast.write(_CHUNK[: max(1, min(len(_CHUNK), self._left() - room))])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self, processes: Sequence[int]) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)

    def _left(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize


class FileSizeLimit:
    """The processes' own limit (RLIMIT_FSIZE), a little over the largest file that is there."""

    kind = "file size limit"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fill(self, room: int, processes: Sequence[int]) -> None:
        largest = max(
            (path.stat().st_size for path in self._folder.rglob("*") if path.is_file()), default=0
        )
        self._limit(largest + room, processes)

    def free(self, processes: Sequence[int]) -> None:
        self._limit(None, processes)

    def close(self) -> None:
        self.free(())

    def _limit(self, size: int | None, processes: Sequence[int]) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                _, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
                resource.prlimit(
                    process, resource.RLIMIT_FSIZE, (hard if size is None else size, hard)
                )
