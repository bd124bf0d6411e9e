"""What an eviction method is: an observation, a score and a selection."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor


@dataclass(frozen=True)
class LayerRows:
    """One layer of one session at the moment of eviction, with what was observed.

    keys, values `[n_kv_heads, n, head_dim]`; positions int32 `[n_kv_heads, n]` (`EMPTY`: no row); queries
    `[n_heads, t, head_dim]` of the observed tokens at query_positions int32 `[t]`, t may be 0. `seed` differs from
    eviction to eviction, `layer` from layer to layer.
    """

    layer: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    query_positions: Tensor
    seed: int


class Method(Protocol):
    """A frozen dataclass of settings. The engine protects rows and holds the budget; the method only ranks.

    `name` is what a session asks for; a method that does not evict (`evicts = False`) keeps every row.
    """

    name: ClassVar[str]
    evicts: ClassVar[bool]

    @property
    def observes(self) -> int:
        """How many of the turn's last tokens to observe; 0 for none."""
        ...

    def scores(self, rows: LayerRows) -> Tensor:
        """Score every row, higher is kept longer: float32 `[n_kv_heads, n]`."""
        ...

    def select(self, scores: Tensor, rows: LayerRows, budget: int) -> Tensor:
        """Choose at most `budget` rows per head: places int64 `[n_kv_heads, m]`, ascending, -1 for none."""
        ...
