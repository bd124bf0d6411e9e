"""KeyDiff: keys that differ from the others."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import KeyDiffSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.scoring import cosine_to_mean


@dataclass(frozen=True)
class KeyDiff(KeyDiffSettings, Method):
    """Negative cosine of a key to the mean direction of its head's keys.

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
    Inference in Resource-Constrained Environments" (2025), section 3. It observes no queries.

    Deviations: `pool_heads` follows EpiCache's comparison (appendix A.2); `whole_tokens` is not in
    the paper.
    """

    name: ClassVar[str] = "keydiff"

    @property
    def compares_rows(self) -> bool:
        """True: keys are compared with their mean."""
        return True

    def scores(self, rows: LayerRows) -> Tensor:
        """Negative cosine similarity to the mean."""
        return -cosine_to_mean(rows.keys, rows.positions)
