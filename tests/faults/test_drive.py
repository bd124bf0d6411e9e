"""A simulated drive keeps what was synced through a loss of power, and only a part of the rest."""

import errno
import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from faults.rig.drive import Drive, read_journal
from faults.rig.shim import compile_shim

SEEDS = range(12)
WRITER = """
import os, sys
folder = sys.argv[1]
synced = os.open(folder + "/synced", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(synced, b"first")
os.fsync(synced)
directory = os.open(folder, os.O_RDONLY)
os.fsync(directory)
os.write(synced, b"second")
loose = os.open(folder + "/loose", os.O_WRONLY | os.O_CREAT)
os.write(loose, b"third")
os.fsync(loose)
print("written", flush=True)
sys.stdin.read()
"""
STREAM = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
folder = sys.argv[1].encode()
file = ctypes.c_void_p(libc.fopen(folder + b"/temporary", b"w"))
libc.fputs(b"a base, ", file)
libc.fflush(file)
libc.fputs(b"synced", file)
libc.fflush(file)
os.fsync(libc.fileno(file))
libc.fputs(b", and more", file)
libc.fclose(file)
os.rename(folder + b"/temporary", folder + b"/base")
directory = os.open(folder, os.O_RDONLY)
os.fsync(directory)
print("written", flush=True)
sys.stdin.read()
"""
PAIR = """
import os, sys
folder = sys.argv[1]
directory = os.open(folder, os.O_RDONLY)
first, second = (os.open(folder + "/" + name, os.O_WRONLY | os.O_CREAT) for name in ("one", "two"))
os.fsync(directory)
pid = os.fork()
file = os.open(folder + ("/two" if pid else "/one"), os.O_WRONLY | os.O_APPEND)
for number in range(100):
    os.write(file, b"%02d" % number)
    os.fsync(file)
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
print("written", flush=True)
sys.stdin.read()
"""
COMMITS = """
import sqlite3, sys
catalog = sqlite3.connect(sys.argv[1] + "/catalog", isolation_level=None)
catalog.execute("PRAGMA journal_mode=WAL")
catalog.execute(f"PRAGMA synchronous={sys.argv[2]}")
catalog.execute("CREATE TABLE IF NOT EXISTS turns (number)")
for number in range(20):
    catalog.execute("INSERT INTO turns VALUES (?)", (number,))
print("written", flush=True)
sys.stdin.read()
"""
FAILING = """
import os, sys
file = os.open(sys.argv[1] + "/catalog.sqlite3", os.O_WRONLY | os.O_CREAT)
for line in sys.stdin:
    try:
        os.write(file, b"x")
        os.fsync(file)
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim. The tests of simulated drives need a C compiler."""
    compiled = compile_shim(tmp_path_factory.mktemp("shim"))
    assert compiled is not None, "install a C compiler, such as gcc"
    return compiled


@pytest.fixture
def drive(shim: Path, tmp_path: Path) -> Drive:
    """A drive with the folder `data`."""
    (tmp_path / "data").mkdir()
    return Drive(shim, [tmp_path / "data"], tmp_path / "work")


def run_and_kill(drive: Drive, folder: Path, program: str, *arguments: str) -> None:
    """Run a program until it has written, then kill -9."""
    drive.arm()
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder), *arguments],
        env={**os.environ, **drive.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()


def test_synced_bytes_survive_and_others_by_chance(drive: Drive, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    contents, names = set(), set()
    for seed in SEEDS:
        run_and_kill(drive, folder, WRITER)
        drive.cut(Random(seed))
        contents.add((folder / "synced").read_bytes())
        names.add((folder / "loose").exists())
        for path in folder.iterdir():
            path.unlink()
    assert {content[:5] for content in contents} == {b"first"}
    assert {b"first", b"firstsecond"} <= contents
    assert names == {True, False}, "the directory was not synced after the file was created"


def test_a_stream_that_was_synced_survives_under_its_new_name(drive: Drive, tmp_path: Path) -> None:
    """So Redis writes the base of its log since version 7."""
    folder = tmp_path / "data"
    run_and_kill(drive, folder, STREAM)
    drive.cut(Random(1))
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert left == {"base": b"a base, synced"}


def test_a_kill_alone_loses_nothing(drive: Drive, tmp_path: Path) -> None:
    run_and_kill(drive, tmp_path / "data", WRITER)
    assert (tmp_path / "data" / "synced").read_bytes() == b"firstsecond"
    run_and_kill(drive, tmp_path / "data", WRITER)
    drive.cut(Random(0))
    assert (tmp_path / "data" / "synced").read_bytes().startswith(b"firstsecondfirst")


def test_what_each_of_two_processes_synced_survives(drive: Drive, tmp_path: Path) -> None:
    """A worker's ranks share a drive and its journal."""
    folder = tmp_path / "data"
    run_and_kill(drive, folder, PAIR)
    drive.cut(Random(0))
    expected = b"".join(b"%02d" % number for number in range(100))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "one": expected,
        "two": expected,
    }


def test_operations_behind_a_torn_one_are_read() -> None:
    """Another process wrote them, after a kill in the middle of the write of a record."""

    def record(data: bytes) -> bytes:
        path = b"/data/one"
        return (
            struct.pack("<IIQQQQ", 0x4B564A31, ord("W"), 1, 0, len(path), len(data)) + path + data
        )

    whole = [record(bytes([number]) * 50) for number in range(3)]
    journal = whole[0] + record(bytes(100))[:90] + whole[1] + whole[2] + record(bytes(100))[:30]
    assert [(each.data[0], len(each.data)) for each in read_journal(journal)] == [
        (number, 50) for number in range(3)
    ]


@pytest.mark.parametrize(("synchronous", "survive"), [("FULL", True), ("OFF", False)])
def test_commits_of_sqlite_survive_where_they_are_synced(
    drive: Drive, tmp_path: Path, synchronous: str, survive: bool
) -> None:
    folder = tmp_path / "data"
    kept = []
    for seed in SEEDS:
        run_and_kill(drive, folder, COMMITS, synchronous)
        drive.cut(Random(seed))
        kept.append(count_turns(folder / "catalog"))
        for path in folder.iterdir():
            path.unlink()
    assert all(number == 20 for number in kept) == survive


def count_turns(path: Path) -> int:
    """Number of turns in a catalog; 0 in one that is lost or cannot be read."""
    try:
        with closing(sqlite3.connect(path)) as catalog:
            return int(catalog.execute("SELECT count(*) FROM turns").fetchone()[0])
    except sqlite3.DatabaseError:
        return 0


def test_writes_and_syncs_fail_while_they_are_disturbed(drive: Drive, tmp_path: Path) -> None:
    drive.arm()
    with subprocess.Popen(
        [sys.executable, "-c", FAILING, str(tmp_path / "data")],
        env={**os.environ, **drive.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def write() -> int:
            stdin.write("\n")
            stdin.flush()
            return int(stdout.readline())

        assert write() == 0
        drive.disturb("fails", part="catalog")
        assert write() == errno.EIO
        drive.disturb(write_errno=errno.ENOSPC, part="catalog")
        assert write() == errno.ENOSPC
        drive.disturb("fails", part="pages/")
        assert write() == 0
        drive.disturb()
        assert write() == 0
        stdin.close()
