"""Time that a process's threads wait for a CPU: others run on the machine meanwhile."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_NANOSECONDS = 1e9


def read_waits(pid: int) -> dict[int, float]:
    """Seconds that each thread of a process and its descendants has waited for a CPU so far.

    Empty where the system does not count them.
    """
    root = psutil.Process(pid)
    waits: dict[int, float] = {}
    for process in (root, *root.children(recursive=True)):
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with suppress(OSError):  # it has ended meanwhile
                waits[int(thread.parent.name)] = parse_wait(thread.read_text(encoding="utf-8"))
    return waits


def parse_wait(schedstat: str) -> float:
    """Seconds of waiting in a thread's schedstat file: time on a CPU, time waiting, slices."""
    return int(schedstat.split()[1]) / _NANOSECONDS


def longest_wait(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """The longest wait of one thread between two readings, in seconds."""
    return max((wait - before.get(thread, 0.0) for thread, wait in after.items()), default=0.0)
