"""InfiniPot: what a request for a summary attends to."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import Reduction, attention_scores


@dataclass(frozen=True)
class InfiniPot(Method):
    """Attention of a fixed prompt that asks for a summary, max over its tokens and over a KV head's group.

    Source: Kim et al., "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs" (2024), section 3, the
    catalyst prompt; the prompt's words and the max are EpiCache's comparison's (appendix A.2, eq. 3). Left out: the
    paper's second score, how much a token surprises the compressed model, and its new positions for kept rows.
    `pool_heads` shares a layer's budget between its heads by score, as that comparison does.
    """

    prompt: Annotated[str, Field(min_length=1, max_length=2000)] = (
        "Summarize the previous context highlighting the most important parts."
    )
    tokens: Reduction = "max"
    pool_heads: bool = False

    name: ClassVar[str] = "infinipot"

    @property
    def observation(self) -> Observation:
        """The prompt."""
        return Observation(prompt=self.prompt)

    def scores(self, rows: LayerRows) -> Tensor:
        """The prompt's attention."""
        return attention_scores(
            rows.queries,
            rows.keys,
            rows.positions,
            rows.query_positions,
            rows.extra_logsumexp,
            tokens=self.tokens,
        )
