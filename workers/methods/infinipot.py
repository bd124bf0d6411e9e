"""InfiniPot: attention of a request for a summary."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from workers.methods.base import LayerRows, Method
from workers.primitives.observation import Observation
from workers.primitives.scoring import Reduction, attention_scores


@dataclass(frozen=True)
class InfiniPot(Method):
    """Attention of a fixed prompt that asks for a summary, max over its tokens and heads.

    Source: Kim et al., "InfiniPot: Infinite Context Processing on Memory-Constrained LLMs" (2024),
    section 3, the catalyst prompt. The wording of the prompt and the max are those of EpiCache's
    comparison (appendix A.2, eq. 3).

    Deviations: the paper's second score (a token's surprise under the compressed model) and its
    renumbered positions are left out.
    """

    prompt: Annotated[
        str, Field(min_length=1, max_length=2000, description="Prompt run after each block.")
    ] = "Summarize the previous context highlighting the most important parts."
    tokens: Annotated[
        Reduction, Field(description="Reduction of attention over the prompt's tokens.")
    ] = "max"
    pool_heads: Annotated[
        bool,
        Field(description="Share a layer's budget between its heads by score (EpiCache A.2)."),
    ] = False

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
