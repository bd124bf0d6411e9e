"""A loss of power: only what was synced is left."""

import os
import stat
from collections.abc import Callable
from pathlib import Path


class PowerCut:
    """Stands in for os.fsync and remembers the contents that were synced."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync = sync
        self._contents: dict[str, bytes] = {}
        self._entries: list[str] = []
        self.calls = 0

    def fsync(self, descriptor: int) -> None:
        self._sync(descriptor)
        self.calls += 1
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            self._entries = [name for name in os.listdir(descriptor) if name.endswith(".kv")]
        else:
            name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
            self._contents[name] = os.pread(descriptor, status.st_size, 0)

    def restore(self, directory: Path, *, written: Path | None = None, share: float = 0.0) -> None:
        """Restore what was synced; of what was `written` behind it, that share of each file."""
        directory.mkdir()
        for name in self._entries:
            content = self._contents.get(name, b"")
            if written is not None and (written / name).exists():
                behind = (written / name).read_bytes()[len(content) :]
                content += behind[: int(share * len(behind))]
            (directory / name).write_bytes(content)
