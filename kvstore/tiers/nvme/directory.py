"""The directory of a segment log: one process at a time owns it."""

import fcntl
import os
from pathlib import Path

from kvstore.errors import DirectoryLockedError
from kvstore.tiers.nvme.segment import map_os_errors


def lock_directory(directory: Path) -> int:
    """Lock the directory for this process; return the descriptor that holds the lock.

    Raises DirectoryLockedError when another process has it.
    """
    with map_os_errors(directory):
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DirectoryLockedError(
            f"{directory} is used by another process; stop it, or use another directory"
        ) from error
    return descriptor


def sync_directory(directory: Path) -> None:
    """Wait until the names of new and removed files are on the disk."""
    with map_os_errors(directory):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
