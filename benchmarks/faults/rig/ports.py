"""Local ports of a process's connections, as /proc has them: who is behind a connection."""

import os
from contextlib import suppress
from pathlib import Path

_LOCAL_ADDRESS, _INODE = 1, 9


def local_ports(pid: int) -> frozenset[int]:
    """Ports of this machine that sockets of a process are bound to; empty if it is gone."""
    sockets = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
        found = set()
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()
            for words in (line.split() for line in lines[1:]):
                if f"socket:[{words[_INODE]}]" in sockets:
                    found.add(int(words[_LOCAL_ADDRESS].rpartition(":")[2], 16))
        return frozenset(found)
    return frozenset()
