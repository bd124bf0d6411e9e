"""Memory of the active rows: what a worker's slots take, and what the machine has."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrecall_server.app.errors import CannotServe
from workers.engine.settings import WorkerSettings

if TYPE_CHECKING:
    import torch

    from workers.cache.slot_pool import KVShape

# The share of the RAM tier that recurrent states have: one in so many bytes.
STATE_SHARE = 4
# Of a row beside key and value: position, mark of a promotion, sum of observations.
_BOOKKEEPING_BYTES = 4 + 1 + 4
_MEMINFO = Path("/proc/meminfo")
# Limit of a container's memory, and what of it cannot be freed: of version 2 and 1 of cgroups.
_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_rss",
    ),
)


@dataclass(frozen=True)
class RowShape:
    """What decides the bytes of a slot.

    Attributes:
        n_layers: Layers whose rows are selected.
        n_kv_heads: Their KV heads.
        row_numbers: Numbers of a row: of a key and a value, or of a latent.
        itemsize: Bytes of a number.
        side_bytes: Bytes of a slot's windows and recurrent states.
    """

    n_layers: int
    n_kv_heads: int
    row_numbers: int
    itemsize: int
    side_bytes: int = 0

    @classmethod
    def of(
        cls, shape: "KVShape", n_layers: int, dtype: "torch.dtype", side_bytes: int
    ) -> "RowShape":
        """Describe so many layers of a model's managed rows."""
        row_numbers = shape.parts * shape.head_dim
        return cls(n_layers, shape.n_kv_heads, row_numbers, dtype.itemsize, side_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that is active in every head."""
        row = self.row_numbers * self.itemsize + _BOOKKEEPING_BYTES
        return self.n_layers * self.n_kv_heads * row


def get_pool_bytes(shape: RowShape, settings: WorkerSettings) -> int:
    """Bytes of all slots, which are allocated when a worker starts."""
    return settings.slots * (settings.slot_rows * shape.token_bytes + shape.side_bytes)


def require_room(shape: RowShape, settings: WorkerSettings, free: int, where: str) -> None:
    """Raise CannotServe if the slots do not fit `free` bytes of `where`: memory or a GPU's memory."""
    needed = get_pool_bytes(shape, settings)
    if needed <= free:
        return
    slots = free // (settings.slot_rows * shape.token_bytes + shape.side_bytes)
    beside = settings.slot_rows - settings.max_budget
    rows = (free // settings.slots - shape.side_bytes) // shape.token_bytes
    budget = rows - beside
    ways = [f"--slots {slots}"] if slots else []
    ways += [f"--budget {budget}"] if budget >= settings.min_budget else []
    raise CannotServe(
        f"the active rows do not fit {where}: {settings.slots:,} slots x {settings.slot_rows:,} rows "
        f"(budget {settings.max_budget:,}, and {beside:,} of a block and a prompt) x "
        f"{shape.token_bytes:,} bytes{_describe_side(shape)} are {to_gibibytes(needed)}, and "
        f"{to_gibibytes(free)} are free; "
        f"lower --slots and --budget{', at most to ' + ' or '.join(ways) if ways else ''}"
    )


def _describe_side(shape: RowShape) -> str:
    return f" and windows and states of {shape.side_bytes:,} bytes each" if shape.side_bytes else ""


def divide_memory(slots: int, ram: int | None, free: int | None) -> int:
    """Return the bytes for stored rows, so that they and the slots' bytes fit `free` bytes; None: unknown.

    ram: as set; None: their share of what is there. Raises CannotServe if they do not fit.
    """
    # Gateways have none of the worker's libraries, and their commands are beside `doctor`.
    from workers.engine.host.memory import get_ram_bytes

    stored = get_ram_bytes(ram, None if free is None else free - slots)
    if free is not None and slots + stored > free:
        raise CannotServe(
            f"the rows do not fit memory: slots {to_gibibytes(slots)} and stored rows "
            f"{to_gibibytes(stored)} are {to_gibibytes(slots + stored)}, and {to_gibibytes(free)} are "
            "free; lower --ram, --slots or --budget"
        )
    return stored


def get_free_memory() -> int | None:
    """Bytes that this process may still allocate, by the machine and its container; None: unknown."""
    found = list(_iter_free())
    return min(found) if found else None


def to_gibibytes(count: int) -> str:
    """A number of bytes in GiB."""
    return f"{count / (1 << 30):,.1f} GiB"


def _iter_free() -> Iterator[int]:
    with suppress(OSError, ValueError, KeyError):
        yield int(_read_table(_MEMINFO)["MemAvailable:"]) << 10
    for limit, usage, name in _CGROUPS:
        with suppress(OSError, ValueError, KeyError):  # the limit may be "max": none
            yield int(Path(limit).read_text()) - int(_read_table(Path(usage))[name])


def _read_table(path: Path) -> dict[str, str]:
    """Read lines of a name and a number."""
    words = (line.split() for line in path.read_text().splitlines())
    return {name: number for name, number, *_ in words}
