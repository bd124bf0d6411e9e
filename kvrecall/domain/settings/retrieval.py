"""The settings of a session's retrieval."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class RetrievalSettings:
    """Rows that each step finds for its own queries among those that are not active.

    Source: IceCache sections 3 and 4. The paper retrieves whole pages of 16 rows and keeps the first
    two layers whole on the device. Here every layer retrieves, and single rows: at the same number
    of rows they hold more of the attention (docs/design/retrieval.md).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    share: Annotated[
        float,
        Field(
            ge=0,
            le=0.9,
            description="Share of the budget for the rows that a step retrieves, as far as the rows "
            "that are never evicted leave room; 0: off.",
        ),
    ] = 0.5
    choice: Annotated[
        Literal["sample", "best"],
        Field(
            description="sample: rows are drawn by their weight, and stand for those that are not; "
            "best: the rows of most weight, as in the paper."
        ),
    ] = "sample"
    index: Annotated[
        Literal["auto", "exact", "summaries", "tree"],
        Field(
            description="exact: every stored row is scored; summaries: those that a descent through "
            "means and variances of the keys comes to; tree: those of a DCI-tree's best nodes, as in "
            "the paper; auto: exact up to 65,536 rows, then summaries."
        ),
    ] = "auto"


@dataclass(frozen=True)
class Retrieval(RetrievalSettings):
    """The settings with the constants of the search, which only research replaces.

    - `prompt_tokens`: last tokens of a prompt that are steps of their own and retrieve, before an
      answer; its first token depends on the last of them.
    - `nodes`: of each level of the summaries that a descent chooses, a quarter of the retrieved rows if
      that is more; each has 8 nodes or rows, which are all scored.
    - `scan`: share of the rows that a search of the tree scores.
    """

    prompt_tokens: int = 1
    nodes: int = 768
    scan: float = 0.1

    def rows(self, budget: int, floor: int) -> int:
        """Rows per KV head and layer of a budget that a step retrieves; `floor` are left for others."""
        return max(0, min(int(self.share * budget), budget - floor))
