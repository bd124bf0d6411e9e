"""One session as a worker sees it, and the form in which it outlives the worker."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvrecall.domain.session_settings import RepairScan
from workers.cache.active_cache import EMPTY, ActiveCache
from workers.methods import DEFAULT_SCAN, Method, RepairKV
from workers.model.tokenizer import ChatMessage
from workers.primitives.observation import RecentQueries


@dataclass(frozen=True)
class Selection:
    """Which rows are active: per layer int32 `[n_kv_heads, m]`, ascending, `EMPTY` at a shorter head's end.

    promoted: bool, the same shapes: rows that a repair brought back and that are held for it. accumulated: float32,
    the same shapes: what the rows' queries added up to, for methods that look at it; else empty.
    """

    positions: tuple[Tensor, ...]
    promoted: tuple[Tensor, ...]
    accumulated: tuple[Tensor, ...] = ()

    def to_bytes(self) -> bytes:
        """As safetensors."""
        kinds = {
            "positions": self.positions,
            "promoted": self.promoted,
            "accumulated": self.accumulated,
        }
        return save(
            {
                f"{kind}.{layer}": rows
                for kind, layers in kinds.items()
                for layer, rows in enumerate(layers)
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Selection":
        """Back from `to_bytes`."""
        tensors = load(data)

        def layers(kind: str) -> tuple[Tensor, ...]:
            count = sum(name.startswith(f"{kind}.") for name in tensors)
            return tuple(tensors[f"{kind}.{layer}"] for layer in range(count))

        return cls(layers("positions"), layers("promoted"), layers("accumulated"))

    @classmethod
    def of_slot(cls, cache: ActiveCache, slot: int, *, accumulated: bool = False) -> "Selection":
        """What a slot holds now, on the CPU."""
        layers = [cache.read(slot, layer) for layer in range(cache.shape.n_layers)]
        return cls(
            tuple(_copied(rows.positions) for rows in layers),
            tuple(_copied(rows.promoted) for rows in layers),
            tuple(_copied(rows.accumulated) for rows in layers) if accumulated else (),
        )

    def places(self) -> list[Tensor]:
        """Positions as the row store takes them: int64, -1 for none."""
        return [torch.where(p == EMPTY, -1, p).to(torch.int64) for p in self.positions]

    def rows(self) -> list[int]:
        """Rows per layer, over all heads."""
        return [int((p != EMPTY).sum()) for p in self.positions]

    def held(self) -> list[int]:
        """Rows per head, per layer: the mean over the heads, rounded up."""
        return [-(-n // p.shape[0]) for n, p in zip(self.rows(), self.positions, strict=True)]

    def held_everywhere(self, length: int) -> int:
        """How many of `length` tokens are active in every layer and head."""
        counts = torch.zeros(length + 1, dtype=torch.int64)
        for positions in self.positions:
            where = positions.clamp(max=length).long().flatten()
            counts.index_add_(0, where, torch.ones_like(where))
        return int((counts[:length] == sum(p.shape[0] for p in self.positions)).sum())


def _copied(rows: Tensor) -> Tensor:
    return rows.to("cpu", copy=True).contiguous()


@dataclass(frozen=True)
class Distribution:
    """Next-token log-probabilities on recorded text: token ids `[t]`, float32 `[t, vocabulary]`."""

    token_ids: tuple[int, ...]
    log_probs: Tensor


@dataclass(frozen=True)
class NearSegment:
    """Tokens start .. stop - 1, and how near to an episode what they say is: 1 for its own segments, else 0 to 1."""

    start: int
    stop: int
    nearness: float


def nearness(segments: Sequence[NearSegment]) -> Tensor:
    """How near each token's segment is to an episode: float32 `[m]`, m = 0 where nothing is known."""
    near = torch.zeros(max((segment.stop for segment in segments), default=0))
    for segment in segments:
        near[segment.start : segment.stop] = segment.nearness
    return near


@dataclass
class WorkerSession:
    """A session that is open in this worker. Only the scheduler's thread touches it.

    `slot` is None while the session is swapped out; then `selection` says what its slot held. `patched_prompt` is
    what evictions observe with while `episode` is active. `stored` is False for a session that nobody will resume, or
    whose rows are stored already. `keep_rows` is handed new rows `[n_layers, 2, n_kv_heads, t, head_dim]`, on the
    device, with the position of the first.
    """

    name: str
    epoch: int
    budget: int
    repair_rows: int
    method: Method
    seed: int
    tools: list[Any]
    queries: RecentQueries
    layer_rows: tuple[
        int, ...
    ]  # rows per head that an eviction keeps, per layer: the budget less the reserve
    repair: RepairKV = field(default_factory=RepairKV)
    repair_scan: RepairScan = DEFAULT_SCAN
    length: int = 0
    pending: list[int] = field(default_factory=list)
    recent: list[ChatMessage] = field(default_factory=list)
    eviction_scores: Tensor = field(default_factory=lambda: torch.empty(0))  # see scores_of_evicted
    turn_start: int = 0
    episode: str = ""
    segments: tuple[NearSegment, ...] = ()  # how near each part of the session is to that episode
    patched_prompt: list[int] = field(default_factory=list)
    block: list[int] = field(
        default_factory=list
    )  # what the turn said since the last eviction, at most a block
    promoted_rows: int = 0
    peak: list[int] = field(default_factory=list)
    slot: int | None = None
    selection: Selection | None = None
    arriving: "Future[Any] | None" = None  # that selection's rows
    distribution: Distribution | None = None
    unsettled: bool = False  # a turn or repair is changing the session
    abandoned: bool = False  # one of them broke off
    writes: list["Future[Any]"] = field(default_factory=list)
    stored: bool = True
    keep_rows: Callable[[int, Tensor], None] | None = None

    def scores_of_evicted(self) -> Tensor:
        """With which score each token was last evicted, float32 `[length]`, 0 for those that never were."""
        unknown = self.length - self.eviction_scores.shape[0]
        if unknown:
            self.eviction_scores = torch.cat([self.eviction_scores, torch.zeros(unknown)])
        return self.eviction_scores

    @property
    def reserve(self) -> int:
        """Rows per head that are kept free for a repair; one that swaps needs none."""
        return 0 if self.repair.swap else self.repair_rows

    def target(self, layer: int) -> int:
        """Rows per head that an eviction keeps now: with the reserve while a repair fills it."""
        return self.layer_rows[layer] + (self.reserve if self.promoted_rows else 0)

    def forget_turn(self) -> None:
        """Forget what evictions observe of a turn: a session that was resumed in between evicts the same."""
        self.queries.clear()
        self.block.clear()

    def selected(self, cache: ActiveCache) -> Selection | None:
        """What is active, in the slot or waiting for one; None before anything was said."""
        if self.slot is None:
            return self.selection
        return Selection.of_slot(
            cache, self.slot, accumulated=bool(self.method.observation.accumulate)
        )

    def scratch(
        self, patched_prompt: Sequence[int], segments: tuple[NearSegment, ...]
    ) -> "WorkerSession":
        """A session of the same settings that has said nothing, in this episode, and is not stored."""
        return WorkerSession(
            name=self.name,
            epoch=self.epoch,
            budget=self.budget,
            repair_rows=self.repair_rows,
            method=self.method,
            seed=self.seed,
            tools=self.tools,
            queries=RecentQueries(self.queries.width),
            layer_rows=self.layer_rows,
            repair=self.repair,
            repair_scan=self.repair_scan,
            patched_prompt=list(patched_prompt),
            segments=segments,
            stored=False,
        )
