"""Local ports: free ones, and those of a process's connections, as /proc has them."""

import os
import random
import socket
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


def free_port() -> int:
    """A free port whose bus port, 10,000 above, which a node of a Redis cluster takes, is free too.

    Both lie below the ephemeral range, so that no outgoing connection takes them later, and no bus
    port is given out.
    """
    while True:
        port = random.SystemRandom().randrange(12000, 22000)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10000))
            return port
