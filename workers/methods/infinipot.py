"""InfiniPot: attention of a request for a summary."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvrecall.domain.settings.methods import InfiniPotSettings
from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import attention_scores


@dataclass(frozen=True)
class InfiniPot(InfiniPotSettings, Method):
    """Attention of a fixed prompt that asks for a summary, max over its tokens and heads.

    Source: Kim et al., "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs" (2024),
    section 3, the catalyst prompt. The wording of the prompt and the max are those of EpiCache's
    comparison (appendix A.2, eq. 3).

    Deviations: the paper's second score (a token's surprise under the compressed model) and its
    renumbered positions are left out.
    """

    name: ClassVar[str] = "infinipot"

    @property
    def observation(self) -> Observation:
        """The prompt."""
        return Observation(prompt=self.prompt)

    def scores(self, rows: LayerRows) -> Tensor:
        """Attention of the prompt, including its own keys in the softmax."""
        return attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            rows.extra_logsumexp,
            tokens=self.tokens,
        )
