"""What an eviction method is: an observation, a score and a selection. One page; the methods stand beside it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict
from torch import Tensor

from kvrecall.domain.session_settings import LayerBudgets
from workers.primitives.observation import Observation
from workers.primitives.selection import top_over_heads, top_per_head


@dataclass(frozen=True)
class LayerRows:
    """One layer of one session at the moment of eviction, with what was observed.

    keys, values `[n_kv_heads, n, head_dim]`; positions int32 `[n_kv_heads, n]` (`EMPTY`: no row); queries
    `[n_heads, t, head_dim]` of the observed tokens at query_positions int32 `[t]`, t may be 0. `accumulated`
    float32 `[n_kv_heads, n]`: what earlier observations added up to, 0 for methods that do not accumulate.
    `end` is the position after the newest row. `seed` differs from eviction to eviction, `layer` from layer to layer.
    `beside`: what the observed tokens of a patched prompt see beside the rows, see `Observed`; None: nothing.
    """

    layer: int
    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    query_positions: Tensor
    accumulated: Tensor
    end: int
    seed: int
    extra_logsumexp: Tensor | None = None


class Method(ABC):
    """A frozen dataclass of settings. The engine observes, protects rows and holds the budget; the method only ranks.

    `name` is what a session asks for. `evicts = False` keeps every row. `layer_budgets` is how the budget is split
    over the layers where the session does not say; `has_episodes`: whether a session may have a selection for each of
    its topics.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: ClassVar[str]
    evicts: ClassVar[bool] = True
    has_episodes: ClassVar[bool] = False
    layer_budgets: ClassVar[LayerBudgets] = "uniform"

    @property
    def observation(self) -> Observation:
        """Which queries to score with; by default none."""
        return Observation()

    @property
    def shares_layers(self) -> int:
        """Layers that share one selection; 1: each has its own."""
        return 1

    @property
    def pool_heads(self) -> bool:
        """Whether the heads of a layer share its rows by score, unevenly; without it each has the same."""
        return False

    @property
    def whole_tokens(self) -> bool:
        """Whether a token's rows in all layers and heads are ranked as one, by the mean of their ranks."""
        return False

    @property
    def topic(self) -> float:
        """What it is worth, beside a rank of 0 to 1, that a token's segment is near the active episode; 0: nothing."""
        return 0.0

    @property
    def compares_rows(self) -> bool:
        """Whether a row's score depends on which others there are, beyond a softmax: it changes as others leave."""
        return False

    @abstractmethod
    def scores(self, rows: LayerRows) -> Tensor:
        """Score every row, higher is kept longer: float32 `[n_kv_heads, n]`."""

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Choose at most `budget * n_kv_heads` rows; by default the best of each head, or of all if it pools them.

        scores float32 `[n_kv_heads, n]`, infinite where a row is protected; positions int32 `[n_kv_heads, n]`.
        Returns places int64 `[n_kv_heads, m]`, ascending, -1 for none at a head's end.
        """
        # Whole tokens score the same in all heads: pooled, the first head would take them all.
        select = top_over_heads if self.pool_heads and not self.whole_tokens else top_per_head
        return select(scores, positions, budget)
