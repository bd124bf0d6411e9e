"""ChunkKV: chunks of consecutive tokens are kept or evicted whole."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import ChunkKVSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores
from workers.primitives.selection import newest_first, whole_chunks
from workers.primitives.tokens import over_chunks, over_heads


@dataclass(frozen=True)
class ChunkKV(ChunkKVSettings, Method):
    """Attention of the turn's last `window` tokens, summed over chunks that are kept whole.

    Source: Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient
    Long-Context LLM Inference" (2025), Algorithms 1 and 2.

    Algorithm 1 sums the products of queries and keys; here, as in kvpress, they pass a softmax first,
    so that a query with large products does not outvote the others.

    Chunks begin at multiples of `chunk` in the text. All heads of a layer keep the same chunks, and
    `reuse` consecutive layers keep those of the first of them. The window's rows are kept, in at
    most half of the budget. Deviation of kvpress: it scores a chunk by its mean, which differs for
    the last, shorter chunk; see `aggregate`.
    """

    name: ClassVar[str] = "chunkkv"

    @property
    def observation(self) -> Observation:
        """The turn's last `window` tokens."""
        return Observation(window=self.window)

    @property
    def shares_layers(self) -> int:
        """Layer-wise index reuse (Algorithm 2)."""
        return self.reuse

    def scores(self, rows: LayerRows) -> Tensor:
        """Attention to a row's chunk, over all heads."""
        scores = attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            tokens="mean",
            group="mean",
        )
        scores = over_heads(scores, rows.positions, rows.group)
        return over_chunks(scores, rows.positions, self.chunk, mean=self.aggregate == "mean")

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """Select the window, then whole chunks."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return whole_chunks(scores, positions, budget, self.chunk)
