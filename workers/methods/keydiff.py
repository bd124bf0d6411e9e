"""KeyDiff: keys unlike the others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.scoring import cosine_to_mean


@dataclass(frozen=True)
class KeyDiff(Method):
    """Minus the cosine of a key to the mean of its head's keys at unit length: what is unlike the rest stays.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments" (2025), section 3. It looks at no query. `pool_heads` shares a layer's budget
    between its heads by score, as EpiCache's comparison does (appendix A.2); `whole_tokens` ranks a token by the mean
    of its ranks over layers and heads, so that it is kept or dropped whole, which the paper does not do.
    """

    pool_heads: bool = False
    whole_tokens: bool = False

    name: ClassVar[str] = "keydiff"

    @property
    def compares_rows(self) -> bool:
        """Keys are compared with their mean."""
        return True

    def scores(self, rows: LayerRows) -> Tensor:
        """Minus the cosine."""
        return -cosine_to_mean(rows.keys, rows.positions)
