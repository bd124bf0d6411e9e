"""Where a rank stores the rows of its heads: beside the other ranks', which have other rows of the same pages."""

from pathlib import Path

from kvrecall_server.app.errors import CannotServe
from kvstore.settings import StoreSettings
from workers.parallel.group import Group


def get_rank_folder(data: Path, group: Group) -> Path:
    """Return the folder of a rank's rows; that of a worker of one process is the data directory."""
    return data if group.count == 1 else data / f"rank-{group.index}-of-{group.count}"


def divide_tiers(tiers: StoreSettings, group: Group) -> StoreSettings:
    """Divide the limits of a worker's tiers between its ranks, each with names of its own in Redis.

    Raises CannotServe for a bucket, in which ranks have no names of their own yet.
    """
    if group.count == 1:
        return tiers
    if tiers.cold_url is not None:
        raise CannotServe("--tensor-parallel and KVRECALL_STORE__COLD_URL exclude each other")
    parts = {
        name: limit // group.count
        for name in ("nvme_bytes", "redis_bytes")
        if (limit := getattr(tiers, name)) is not None
    }
    namespace = f"{tiers.redis_namespace}-rank-{group.index}-of-{group.count}"
    return tiers.model_copy(update={**parts, "redis_namespace": namespace})
