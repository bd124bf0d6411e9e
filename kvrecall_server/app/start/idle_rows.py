"""Rows in a data directory that no worker reads any more: of another number of ranks."""

from dataclasses import dataclass
from pathlib import Path

from kvrecall_server.app.rank_storage import STATES, find_counts
from kvrecall_server.app.start.memory import to_gibibytes


@dataclass(frozen=True)
class IdleRows:
    """Rows of workers of another number of ranks, which the one in use does not read.

    Attributes:
        count: Ranks of the worker that stored them.
        names: Names of their folders under the data directory, as a shell takes them.
        bytes: Bytes of all files there.
    """

    count: int
    names: tuple[str, ...]
    bytes: int

    @property
    def what(self) -> str:
        """What they are, in words."""
        ranks = f"of {self.count} ranks" if self.count > 1 else "of one process"
        return f"{to_gibibytes(self.bytes)} of rows of a worker {ranks}"

    @property
    def advice(self) -> str:
        """What can be done about them."""
        return (
            f"not read: its sessions were computed again. Delete {' and '.join(self.names)} to have the "
            f"space back, unless a worker with --tensor-parallel {self.count} is to go on"
        )


def find_idle_rows(data: Path, used: int) -> list[IdleRows]:
    """Find the rows under a data directory that a worker of `used` ranks does not read."""
    found = []
    for count in find_counts(data):
        names = (f"rank-*-of-{count}",) if count > 1 else ("pages", STATES)
        folders = [folder for name in names for folder in data.glob(name)]
        files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
        if count != used:
            found.append(IdleRows(count, names, sum(path.stat().st_size for path in files)))
    return found
