"""Memory of the host that a worker may use: the machine's, or what its container is limited to."""

from collections.abc import Iterable
from pathlib import Path

import psutil

# The limit of a container, in bytes: of version 2 and 1 of Linux' control groups.
LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# Stored rows have one part in so many, unless the settings say otherwise: three quarters of it, which
# sessions may hold (`RamTier.reserve`), are a quarter of the memory.
_ROW_SHARE = 3


def measure_host_memory(limits: Iterable[Path] = LIMITS) -> int:
    """Return the bytes of memory that this process may use; a limit that cannot be read is none."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for path in limits if (limit := _read_limit(path)))])


def get_ram_bytes(wanted: int | None = None, free: int | None = None) -> int:
    """Return the bytes for stored rows: `wanted`, or a third of the memory, at most `free` bytes."""
    if wanted is not None:
        return wanted
    share = measure_host_memory() // _ROW_SHARE
    return share if free is None else max(0, min(share, free))


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text("ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
