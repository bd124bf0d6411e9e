"""A simulated drive that loses power: only what was synced survives, and a part of what was not.

shim.c, preloaded into a process, journals its writes, truncations, renames, deletions and syncs of
the files in `folders`. After a loss of power `cut` leaves there, of each file, everything before its
last sync and a random part of the rest: whole writes, or some of their sectors. Entries of a
directory that was not synced survive up to a random one, in their order. Directories themselves
always survive.
"""

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Literal

from faults.rig.shim import PRELOAD

SECTOR_BYTES = 512
_RECORD = struct.Struct("<IIQQQQ")
_MAGIC = 0x4B564A31
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
_CONTROL = struct.Struct("<IIII240s")

SyncMode = Literal["normal", "slow", "fails", "hangs"]
_SYNC_MODES: Sequence[SyncMode] = ("normal", "slow", "fails", "hangs")


@dataclass(frozen=True)
class Operation:
    """An operation of the journal; `position` is its offset there, in bytes.

    `kind`: C(reate), W(rite), T(runcate), S(ync), R(ename to `data`), U(nlink). `offset` of a sync
    is the length of the journal when it began; `inode` of a kept entry is the number of its file.
    """

    position: int
    kind: str
    inode: int
    offset: int
    path: str
    data: bytes


@dataclass
class Contents:
    """Durable bytes of a file, and the operations since its last sync."""

    durable: bytearray
    pending: list[Operation] = field(default_factory=list)

    def sync(self, end: int) -> None:
        """Make the operations before position `end` of the journal durable."""
        for operation in self.pending:
            if operation.position < end:
                _apply(self.durable, operation)
        self.pending = [each for each in self.pending if each.position >= end]

    def current(self) -> bytes:
        """Bytes that the processes see."""
        now = bytearray(self.durable)
        for operation in self.pending:
            _apply(now, operation)
        return bytes(now)

    def surviving(self, rng: Random, in_order: bool) -> bytes:
        """Bytes after a loss of power; `in_order`: no write survives one before it that does not."""
        kept = bytearray(self.durable)
        share = rng.choice((0.0, 0.5, 0.9, 1.0))
        for operation in self.pending:
            if rng.random() < share:
                torn = rng.random() < 0.2
                _apply(kept, _tear(operation, rng) if torn else operation)
                if not (torn and in_order):
                    continue
            if in_order:
                break
        return bytes(kept)


class Drive:
    """Files of `folders` as one process writes them; `work` holds journals and the control file.

    `append_only`: the writes to a file survive in their order, and a sync of a new file makes its
    name durable, as most file systems do and Redis 6 relies on. kvrecall and SQLite must do without.
    """

    def __init__(
        self, shim: Path, folders: Sequence[Path], work: Path, append_only: bool = False
    ) -> None:
        self._shim = shim
        self._append_only = append_only
        self._folders = [folder.resolve() for folder in folders]
        self._work = work
        self._number = 0
        # Files have numbers of their own: inodes are used again.
        self._next_file = 0
        self._by_inode: dict[int, int] = {}
        self._files: dict[int, Contents] = {}
        self._durable: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._entries: list[Operation] = []
        work.mkdir(parents=True, exist_ok=True)
        self.disturb()

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment of the process, which has to be started next."""
        return {
            PRELOAD: str(self._shim),
            "KVRECALL_FAULTS_ROOTS": ":".join(map(str, self._folders)),
            "KVRECALL_FAULTS_JOURNAL": str(self._journal),
            "KVRECALL_FAULTS_CONTROL": str(self._control),
        }

    def disturb(
        self,
        sync: SyncMode = "normal",
        milliseconds: int = 0,
        write_errno: int = 0,
        part: str = "",
    ) -> None:
        """Let syncs be slow, fail or hang, and writes fail, in files with `part` in their path.

        Without arguments: everything works again.
        """
        mode = _SYNC_MODES.index(sync)
        with self._control.open("r+b" if self._control.exists() else "w+b") as control:
            control.write(_CONTROL.pack(mode, milliseconds, write_errno, 0, part.encode()))

    def arm(self) -> None:
        """Take the state that the ended process left, before the next one starts.

        What others changed in the files meanwhile, or a kill left half done, counts as durable.
        """
        self._read_journal()
        found = {str(path): path for path in self._paths()}
        for gone in set(self._names) - set(found):
            self._names.pop(gone)
            self._durable.pop(gone, None)
        self._entries = [each for each in self._entries if each.path in found or each.data]
        for name, path in found.items():
            content = path.read_bytes()
            known = self._files.get(self._names.get(name, -1))
            if known is None or known.current() != content:
                file = self._add_file(path.stat().st_ino, content)
                self._names[name] = self._durable[name] = file
        pending = {entry.inode for entry in self._entries}
        used = {*self._names.values(), *self._durable.values(), *pending}
        self._files = {number: file for number, file in self._files.items() if number in used}
        self._number += 1

    def cut(self, rng: Random) -> None:
        """Leave in the folders what survives a loss of power; no process uses them."""
        self._read_journal()
        names = dict(self._durable)
        for entry in self._entries[: rng.randrange(len(self._entries) + 1)]:
            _enter(names, entry)
        kept = {
            name: self._files[file].surviving(rng, self._append_only or rng.random() < 0.5)
            for name, file in names.items()
        }
        for path in self._paths():
            path.unlink()
        self._files, self._by_inode, self._names, self._durable = {}, {}, {}, {}
        self._entries = []
        for name, content in kept.items():
            Path(name).write_bytes(content)
            Path(name).chmod(0o600)
        # Nothing is pending any more: the next `arm` takes what is there as durable.

    @property
    def _journal(self) -> Path:
        return self._work / f"journal-{self._number}"

    @property
    def _control(self) -> Path:
        return self._work / "control"

    def _paths(self) -> Iterator[Path]:
        for folder in self._folders:
            for path in folder.rglob("*") if folder.exists() else ():
                if path.is_file() and not path.is_symlink() and not path.name.endswith("-shm"):
                    yield path

    def _read_journal(self) -> None:
        """Apply and delete the journal. Its process has ended."""
        if not self._journal.exists():
            return
        for operation in read_journal(self._journal.read_bytes()):
            self._take(operation)
        # What was journalled before is older than every position of the next journal.
        for file in self._files.values():
            file.pending = [replace(each, position=-1) for each in file.pending]
        self._entries = [replace(each, position=-1) for each in self._entries]
        self._journal.unlink()

    def _take(self, operation: Operation) -> None:
        match operation.kind:
            case "C" | "R" | "U":
                if operation.kind == "C":
                    self._add_file(operation.inode)
                entry = replace(operation, inode=self._by_inode.get(operation.inode, -1))
                _enter(self._names, entry)
                self._entries.append(entry)
            case "W" | "T" if operation.inode in self._by_inode:
                self._files[self._by_inode[operation.inode]].pending.append(operation)
            case "S" if os.path.isdir(operation.path):
                self._sync_directory(operation)
            case "S" if operation.inode in self._by_inode:
                self._files[self._by_inode[operation.inode]].sync(operation.offset)
                if self._append_only and operation.path in self._names:
                    self._durable[operation.path] = self._names[operation.path]

    def _add_file(self, inode: int, content: bytes = b"") -> int:
        self._next_file += 1
        self._by_inode[inode] = self._next_file
        self._files[self._next_file] = Contents(bytearray(content))
        return self._next_file

    def _sync_directory(self, sync: Operation) -> None:
        later = []
        for entry in self._entries:
            inside = sync.path in (
                os.path.dirname(entry.path),
                os.path.dirname(entry.data.decode()),
            )
            if inside and entry.position < sync.offset:
                _enter(self._durable, entry)
            else:
                later.append(entry)
        self._entries = later


def read_journal(data: bytes) -> Iterator[Operation]:
    """Operations of a journal, without torn ones, as a kill leaves: other processes may write behind them."""
    start = 0
    while start + _RECORD.size <= len(data):
        magic, kind, inode, offset, path_bytes, size = _RECORD.unpack_from(data, start)
        end = start + _RECORD.size + path_bytes + size
        follows = _MAGIC_BYTES.startswith(data[end : end + len(_MAGIC_BYTES)])
        if magic != _MAGIC or end > len(data) or not follows:
            if (start := data.find(_MAGIC_BYTES, start + 1)) < 0:
                return
            continue
        middle = end - size
        path = data[start + _RECORD.size : middle].decode()
        yield Operation(start, chr(kind), inode, offset, path, data[middle:end])
        start = end


def _enter(names: dict[str, int], entry: Operation) -> None:
    """Apply an operation to a directory's entries."""
    if entry.kind == "C":
        names[entry.path] = entry.inode
        return
    inode = names.pop(entry.path, None)
    if entry.kind == "R" and inode is not None:
        names[entry.data.decode()] = inode


def _apply(content: bytearray, operation: Operation) -> None:
    if operation.kind == "T":
        del content[operation.offset :]
        content.extend(bytes(operation.offset - len(content)))
        return
    content.extend(bytes(max(0, operation.offset - len(content))))
    content[operation.offset : operation.offset + len(operation.data)] = operation.data


def _tear(operation: Operation, rng: Random) -> Operation:
    """A part of a write, up to the end of one of its sectors."""
    first = SECTOR_BYTES - operation.offset % SECTOR_BYTES
    ends = [0, *range(first, len(operation.data), SECTOR_BYTES)]
    if operation.kind != "W":
        return operation
    return replace(operation, data=operation.data[: rng.choice(ends)])
