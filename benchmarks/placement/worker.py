"""A simulated worker: its tiers, its slots, and one prefill at a time."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.placement.cost import Cost, Found, count_tokens
from benchmarks.placement.lru import Blocks
from benchmarks.placement.traces import Turn


@dataclass(frozen=True)
class Served:
    """A turn that a worker served: seconds until its first token, its end, and what was found."""

    worker: str
    wait: float
    end: float
    busy: float
    found: Found


@dataclass
class Worker:
    """A worker that serves turns in the order of their arrival.

    `shared` is the tier of all workers, which drops nothing. The model prefills one prompt at a time; what is
    read from slower tiers is read before that, without the model. Decoding holds a slot.
    """

    name: str
    cost: Cost
    ram: Blocks
    files: Blocks
    shared: set[int]
    slots: int
    _free_at: list[float] = field(default_factory=list)
    _model_free_at: float = 0.0

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.slots

    def count_held(self, blocks: Sequence[int]) -> int:
        """Count the blocks of a prompt that are in RAM, up to the first that is not."""
        ram = self.ram
        for number, block in enumerate(blocks):
            if block not in ram:
                return number
        return len(blocks)

    def serve(self, turn: Turn, now: float) -> Served:
        """Begin a turn that arrives `now`; what is found is what the tiers hold at this time."""
        found = self._find(turn)
        begin = max(now, heapq.heappop(self._free_at))
        computing = max(begin + self.cost.load_seconds(found), self._model_free_at)
        seconds = self.cost.prefill_seconds(found)
        self._model_free_at = first = computing + seconds
        decoding = turn.output_tokens * self.cost.step_seconds
        end = first + decoding
        heapq.heappush(self._free_at, end)
        return Served(self.name, first - now, end, seconds + decoding / self.slots, found)

    def end(self, turn: Turn) -> None:
        """End a turn: its blocks are in memory, in files and in the shared tier."""
        self.ram.use(turn.written)
        self.files.use(turn.written)
        self.shared.update(turn.written)

    def _find(self, turn: Turn) -> Found:
        """Look for the prompt's blocks, up to the first that lies nowhere; one token is computed."""
        counts = {"ram": 0, "files": 0, "shared": 0}
        for block in turn.blocks:
            tier = self._tier(block)
            if tier is None:
                break
            counts[tier] += 1
        total = sum(counts.values())
        if count_tokens(total) >= turn.input_tokens:
            counts[next(name for name in ("shared", "files", "ram") if counts[name])] -= 1
        ram, files, shared = (count_tokens(counts[name]) for name in ("ram", "files", "shared"))
        return Found(ram, files, shared, turn.input_tokens - ram - files - shared)

    def _tier(self, block: int) -> str | None:
        if block in self.ram:
            return "ram"
        if block in self.files:
            return "files"
        return "shared" if block in self.shared else None
