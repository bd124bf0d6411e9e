"""KVzip: attention while the block is reconstructed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import KVzipSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores


@dataclass(frozen=True)
class KVzip(KVzipSettings, Method):
    """Attention while the block is repeated after a request to do so, max over tokens and heads.

    Source: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"
    (2025), section 3.

    A layer's budget is shared between its heads by score, as in the paper. Deviations: the budget
    is split over the layers beforehand; the paper ranks all layers together. In later blocks the
    rows of earlier ones are scored again, by the repeat of the new block.
    """

    name: ClassVar[str] = "kvzip"

    @property
    def observation(self) -> Observation:
        """The prompt followed by the block."""
        return Observation(prompt=self.prompt, repeats_block=True)

    def scores(self, rows: LayerRows) -> Tensor:
        """Attention of the repeated block."""
        return attention_scores(
            rows.queries, rows.keys, rows.positions, rows.query_positions, rows.extra_logsumexp
        )
