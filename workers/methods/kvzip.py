"""KVzip: what it takes to say the block again."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores


@dataclass(frozen=True)
class KVzip(Method):
    """Attention while the block is said again after a request to repeat it, max over its tokens and over the group.

    Source: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025), section 3.
    A layer's budget is shared between its heads by score, as in the paper; over the layers it is split beforehand
    here, where the paper ranks all layers together. In later blocks the rows of earlier ones are scored again, by
    the repeat of the new block.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=2000)] = (
        "Repeat the previous context exactly."
    )
    pool_heads: bool = True

    name: ClassVar[str] = "kvzip"

    @property
    def observation(self) -> Observation:
        """The prompt and the block."""
        return Observation(prompt=self.prompt, repeats_block=True)

    def scores(self, rows: LayerRows) -> Tensor:
        """The repeat's attention."""
        return attention_scores(
            rows.queries, rows.keys, rows.positions, rows.query_positions, rows.extra_logsumexp
        )
