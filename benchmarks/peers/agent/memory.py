"""Peak memory of a process and its children."""

from pathlib import Path

import psutil


def peak_bytes(pid: int) -> int:
    """Sum of the peak resident set sizes of a process and its descendants that still live."""
    root = psutil.Process(pid)
    return sum(_peak(each) for each in (root, *root.children(recursive=True)))


def _peak(process: psutil.Process) -> int:
    """Peak resident set size; where the system does not count it, the present one."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except OSError:
        return int(process.memory_info().rss)
    return read_peak(status)


def read_peak(status: str) -> int:
    """VmHWM of a process's status file in bytes; 0 for a process without memory."""
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else 0
