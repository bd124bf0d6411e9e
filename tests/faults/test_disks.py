"""A full disk refuses writes with the kernel's errors, and accepts them when it is freed."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.rig.disks import Disk, FileSizeLimit, new_disk

WRITER = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for line in sys.stdin:
    try:
        os.write(file, bytes(100_000))
        os.write(file, bytes(100_000))
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.fixture(params=["best", "fallback"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """The best kind of disk on this machine, and the fallback of every machine."""
    made = (
        new_disk(tmp_path / "disk", 8 << 20)
        if request.param == "best"
        else FileSizeLimit(tmp_path / "disk")
    )
    (tmp_path / "disk").mkdir(exist_ok=True)
    yield made
    made.close()


def test_a_full_disk_refuses_and_a_freed_one_does_not(disk: Disk, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk" / "file")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def write() -> int:
            stdin.write("\n")
            stdin.flush()
            return int(stdout.readline())

        assert write() == 0
        disk.fill(50_000, [process.pid])
        assert write() in (errno.ENOSPC, errno.EFBIG)
        disk.free([process.pid])
        assert write() == 0
        stdin.close()


def test_a_process_that_has_ended_is_skipped(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    disk = FileSizeLimit(tmp_path)
    disk.fill(0, [ended.pid])
    disk.free([ended.pid])
    assert os.listdir(tmp_path) == []
