"""One session as a worker sees it, and the form in which it outlives the worker."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from workers.cache import EMPTY, ActiveCache
from workers.methods import Method
from workers.observation import RecentQueries
from workers.tokenizer import ChatMessage


@dataclass(frozen=True)
class Selection:
    """Which rows are active: per layer int32 `[n_kv_heads, m]`, ascending, `EMPTY` at a shorter head's end.

    promoted: bool, the same shapes: rows that a repair brought back and that are held for it.
    """

    positions: tuple[Tensor, ...]
    promoted: tuple[Tensor, ...]

    def to_bytes(self) -> bytes:
        """As safetensors."""
        tensors = {f"positions.{layer}": rows for layer, rows in enumerate(self.positions)}
        tensors |= {f"promoted.{layer}": rows for layer, rows in enumerate(self.promoted)}
        return save(tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Selection":
        """Back from `to_bytes`."""
        tensors = load(data)
        layers = range(len(tensors) // 2)
        return cls(
            tuple(tensors[f"positions.{layer}"] for layer in layers),
            tuple(tensors[f"promoted.{layer}"] for layer in layers),
        )

    @classmethod
    def of_slot(cls, cache: ActiveCache, slot: int) -> "Selection":
        """What a slot holds now, on the CPU."""
        layers = [cache.read(slot, layer) for layer in range(cache.shape.n_layers)]
        return cls(
            tuple(rows.positions.to("cpu", copy=True).contiguous() for rows in layers),
            tuple(rows.promoted.to("cpu", copy=True).contiguous() for rows in layers),
        )

    def places(self) -> list[Tensor]:
        """Positions as the row store takes them: int64, -1 for none."""
        return [torch.where(p == EMPTY, -1, p).to(torch.int64) for p in self.positions]

    def longest(self) -> list[int]:
        """Rows of the longest head, per layer."""
        return [int((p != EMPTY).sum(-1).max()) if p.numel() else 0 for p in self.positions]


@dataclass(frozen=True)
class Distribution:
    """Next-token log-probabilities on recorded text: token ids `[t]`, float32 `[t, vocabulary]`."""

    token_ids: tuple[int, ...]
    log_probs: Tensor


@dataclass
class WorkerSession:
    """A session that is open in this worker. Only the scheduler's thread touches it.

    `slot` is None while the session is swapped out; then `selection` says what its slot held.
    """

    name: str
    epoch: int
    budget: int
    repair_rows: int
    method: Method
    seed: int
    tools: list[Any]
    queries: RecentQueries
    length: int = 0
    pending: list[int] = field(default_factory=list)
    recent: list[ChatMessage] = field(default_factory=list)
    eviction_scores: Tensor = field(default_factory=lambda: torch.empty(0))  # see scores_of_evicted
    turn_start: int = 0
    promoted_rows: int = 0
    peak: list[int] = field(default_factory=list)
    slot: int | None = None
    selection: Selection | None = None
    distribution: Distribution | None = None
    unsettled: bool = False  # a turn or repair is changing the session
    abandoned: bool = False  # one of them broke off
    writes: list["Future[None]"] = field(default_factory=list)

    def scores_of_evicted(self) -> Tensor:
        """With which score each token was last evicted, float32 `[length]`, 0 for those that never were."""
        unknown = self.length - self.eviction_scores.shape[0]
        if unknown:
            self.eviction_scores = torch.cat([self.eviction_scores, torch.zeros(unknown)])
        return self.eviction_scores

    @property
    def base_rows(self) -> int:
        """Rows per head that an eviction keeps: the budget without the reserve for repair."""
        return self.budget - self.repair_rows

    @property
    def target_rows(self) -> int:
        """Rows per head that an eviction keeps now: the whole budget while a repair's rows are held."""
        return self.budget if self.promoted_rows else self.base_rows
