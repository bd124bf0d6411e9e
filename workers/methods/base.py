"""The eviction-method interface: observe queries, score rows, select rows within a budget."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict
from torch import Tensor

from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.reselection import Reselection
from kvrecall.domain.settings.retrieval import Retrieval
from kvrecall.domain.settings.session import LayerBudgets
from workers.parallel.alone import Alone
from workers.parallel.group import Group
from workers.primitives.observation import Observation
from workers.primitives.scoring import AttentionPooling
from workers.primitives.selection import top_over_heads, top_per_head


@dataclass(frozen=True)
class LayerRows:
    """One layer of one session at the moment of eviction, with the observed queries.

    Attributes:
        layer: Index of the layer.
        keys: Keys after RoPE, `[n_kv_heads, n, head_dim]`.
        values: Values, `[n_kv_heads, n, head_dim]`.
        positions: True token positions, int32 `[n_kv_heads, n]`; `EMPTY` where there is no row.
        queries: Post-RoPE queries of the observed tokens, `[n_heads, t, head_dim]`; t may be 0.
        query_positions: Positions of the observed tokens, int32 `[t]`.
        accumulated: Sum over earlier observations, float32 `[n_kv_heads, n]`; 0 for methods that
            do not accumulate.
        end: Position after the newest row.
        seed: Random seed that differs between evictions; combine it with `layer`.
        extra_logsumexp: Log-sum-exp of the logits of keys outside the cache that the queries also
            attend to, float32 `[n_heads, t]` (see `Observed`); None if there are none.
        group: The ranks that have the layer's other heads, in a model that is divided between ranks.
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
    group: Group = field(default_factory=Alone)


class Method(ABC):
    """Base class of eviction methods; a subclass is a frozen dataclass of settings.

    The engine observes queries, protects rows and enforces the budget; a method only ranks rows.

    Attributes:
        name: The method's name in the API.
        evicts: False if every row is kept.
        has_episodes: True if a session may have one selection per episode of the conversation.
        layer_budgets: Default split of the budget over the layers.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    name: ClassVar[str]
    evicts: ClassVar[bool] = True
    has_episodes: ClassVar[bool] = False
    layer_budgets: ClassVar[LayerBudgets] = "uniform"

    @property
    def observation(self) -> Observation:
        """Queries that rows are scored with; none by default."""
        return Observation()

    @property
    def shares_layers(self) -> int:
        """Number of consecutive layers that share one selection; 1 if each layer has its own."""
        return 1

    @property
    def pool_heads(self) -> bool:
        """True if the heads of a layer share its rows by score, unevenly; else evenly."""
        return False

    @property
    def divides_unevenly(self) -> bool:
        """True if one head of a layer may have more rows than another, which no rank alone can decide."""
        return self.pool_heads and not self.whole_tokens

    @property
    def whole_tokens(self) -> bool:
        """True if a token's rows are ranked together, by their mean rank over layers and heads."""
        return False

    @property
    def topic(self) -> float:
        """Weight of a segment's similarity to the active episode, added to a rank of 0 to 1."""
        return 0.0

    @property
    def compares_rows(self) -> bool:
        """True if a row's score depends on the other rows by more than the softmax."""
        return False

    def first_kept(self, rows: int) -> int | None:
        """Count the first tokens among `rows` that stay, where the others are the newest.

        None for a method that selects by anything else than position.
        """
        return None

    @property
    def reselection(self) -> Reselection | None:
        """When an answer selects its rows anew, unless the session says otherwise; None: never."""
        return None

    @property
    def prefill(self) -> Prefill:
        """What prompts attend to, unless a session says otherwise."""
        return Prefill()

    @property
    def retrieval(self) -> Retrieval | None:
        """How decoding steps retrieve rows, unless the session says otherwise; None: they do not."""
        return None

    @property
    def attention_pooling(self) -> AttentionPooling:
        """How a re-selection reduces the attention to a row and its neighbours to one score."""
        return AttentionPooling()

    @abstractmethod
    def scores(self, rows: LayerRows) -> Tensor:
        """Score every row; higher scores are kept longer. Returns float32 `[n_kv_heads, n]`."""

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Choose at most `budget * n_kv_heads` rows; by default the best of each head.

        With `pool_heads` the best of all heads are chosen together.

        Args:
            scores: float32 `[n_kv_heads, n]`, infinite where a row is protected.
            positions: int32 `[n_kv_heads, n]`.
            budget: Rows per KV head, on average.

        Returns:
            Indices of the kept rows, int64 `[n_kv_heads, m]`, ascending; -1 pads shorter heads.
        """
        # A whole token has the same score in all heads: pooled, the first head would get all rows.
        select = top_over_heads if self.divides_unevenly else top_per_head
        return select(scores, positions, budget)
