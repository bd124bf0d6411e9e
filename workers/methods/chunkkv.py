"""ChunkKV: consecutive tokens live and die together."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores, over_chunks, over_heads
from workers.primitives.selection import newest_first, whole_chunks


@dataclass(frozen=True)
class ChunkKV(Method):
    """Attention of the turn's last `window` tokens, summed over chunks of `chunk` tokens, which stay or go whole.

    Source: Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference"
    (2025), Algorithms 1 and 2. Chunks begin at multiples of `chunk` in the text, every head of a layer keeps the
    same ones, and `reuse` consecutive layers the same as the first of them. The window's rows stay, in at most half
    of the budget. kvpress scores a chunk by its mean, which differs for the last, shorter one.
    """

    window: Annotated[int, Field(ge=1, le=256)] = 32
    chunk: Annotated[int, Field(ge=1, le=256)] = 10
    reuse: Annotated[int, Field(ge=1, le=64)] = 2
    aggregate: Literal["sum", "mean"] = "sum"

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
        """What a row's chunk is attended to, over all heads."""
        scores = attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            tokens="mean",
            group="mean",
        )
        scores = over_heads(scores, rows.positions, rows.end)
        return over_chunks(
            scores, rows.positions, rows.end, self.chunk, mean=self.aggregate == "mean"
        )

    def select(self, scores: Tensor, positions: Tensor, budget: int) -> Tensor:
        """The window, then whole chunks."""
        scores = newest_first(scores, positions, min(self.window, budget // 2))
        return whole_chunks(scores, positions, budget, self.chunk)
