"""Where a rank stores the rows of its heads: beside the other ranks', which have other rows of the same pages.

Imports no torch, nor tiers: checks of folders need none.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from kvrecall_server.app.errors import CannotServe
from kvrecall_server.app.settings import Settings
from kvstore.settings import StoreSettings

STATES = "states"
"""Folder of a data directory in which recurrent states are stored, in tiers of their own."""
_FOLDER = re.compile(r"rank-\d+-of-(\d+)")
# Of tiers that all ranks of a worker share, whatever machines they are on.
_COMMON_LIMITS = ("redis_bytes", "cold_bytes")


@dataclass(frozen=True)
class Rank:
    """One of the `count` ranks of a worker, `local` of which are on its machine.

    A worker of one process is the only one.
    """

    index: int = 0
    count: int = 1
    local: int = 1

    @property
    def name(self) -> str:
        """Name of its folders and namespaces; empty for the only one."""
        return f"rank-{self.index}-of-{self.count}" if self.count > 1 else ""

    def find_folder(self, data: Path) -> Path:
        """Return the folder of its rows under a data directory."""
        return data / self.name

    def divide(self, tiers: StoreSettings) -> StoreSettings:
        """Return its part of a worker's tiers, with names of its own in Redis and a bucket.

        Limits of these are the worker's, that of files is the machine's.
        """
        if self.count == 1:
            return tiers
        shares = dict.fromkeys(_COMMON_LIMITS, self.count) | {"nvme_bytes": self.local}
        update: dict[str, object] = {
            name: limit // share
            for name, share in shares.items()
            if (limit := getattr(tiers, name)) is not None
        }
        update["redis_namespace"] = f"{tiers.redis_namespace}-{self.name}"
        if tiers.cold_url is not None:
            update["cold_url"] = f"{tiers.cold_url.rstrip('/')}/{self.name}"
        return tiers.model_copy(update=update)

    def settings_of(self, settings: Settings) -> Settings:
        """Return the settings of a worker with data directory and tiers of this rank."""
        update = {"data": self.find_folder(settings.data), "store": self.divide(settings.store)}
        return settings.model_copy(update=update)


def list_ranks(count: int) -> list[Rank]:
    """List the ranks of a worker of so many on this machine."""
    return [Rank(index, count, count) for index in range(count)]


def choose_ranks(settings: Settings) -> list[Rank]:
    """Choose the ranks whose rows a stopped worker's tools look at.

    As many as are set; where that is one, and only workers of several have rows, as many as these had.
    Raises CannotServe where they had different numbers.
    """
    found = find_counts(settings.data)
    if settings.tensor_parallel > 1 or 1 in found or not found:
        return list_ranks(settings.tensor_parallel)
    if len(found) > 1:
        raise CannotServe(
            f"{settings.data} has rows of workers of {' and of '.join(map(str, found))} ranks: name the "
            "number that is in use with --tensor-parallel"
        )
    return list_ranks(found[0])


def find_counts(data: Path) -> list[int]:
    """Find the numbers of ranks of workers that have stored rows under a data directory, ascending."""
    matches = (_FOLDER.fullmatch(path.name) for path in data.glob("rank-*-of-*"))
    counts = {int(match[1]) for match in matches if match}
    if any((data / "pages").glob("segment-*.kv")):
        counts.add(1)
    return sorted(counts)
