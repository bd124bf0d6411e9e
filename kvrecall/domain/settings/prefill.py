"""The settings of a session's prefill."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

# Of the new tokens of a pass; with fewer, a sample would cost as much as their attention.
_MIN_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """What prefilled blocks attend to: active rows, every stored row, or lines of the active rows.

    With `attend` = "stored" a block's rows are those of a full cache, as in the papers on eviction:
    the budget holds for what stays active, and for decoding.

    `sparse`: vertical and slash lines that hold most of a block's attention, after LoopServe section
    5.1. The paper covers `alpha` of the weight of the sampled rows, which
    over-fits: `held_out` of them are kept for a check, and lines are added until those are covered
    as well. `sample` = 48 and `held_out` = 0 are the paper's.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    attend: Annotated[
        Literal["active", "stored"],
        Field(
            description="active: blocks attend to the active rows, their cost is bounded; stored: to "
            "all rows of the session, read from the row store, as in a full cache."
        ),
    ] = "active"
    sparse: Annotated[
        Literal["off", "auto", "on"],
        Field(description="auto: in layers that hold at least min_rows rows; on: in every layer."),
    ] = "off"
    alpha: Annotated[
        float, Field(gt=0.5, le=1, description="Share of the attention weight to cover.")
    ] = 0.99
    sample: Annotated[
        int,
        Field(ge=16, le=512, description="Tokens of a block whose attention is computed first."),
    ] = 64
    held_out: Annotated[
        float, Field(ge=0, lt=0.9, description="Share of the sample that only checks the cover.")
    ] = 0.25
    sinks: Annotated[
        int, Field(ge=0, le=128, description="First tokens that are always attended to.")
    ] = 4
    band: Annotated[
        int, Field(ge=0, le=4096, description="Distances, from 0, that are always attended to.")
    ] = 64
    slash_width: Annotated[
        int, Field(ge=1, le=512, description="Distances of a slash line; 1: the paper's.")
    ] = 64
    min_rows: Annotated[
        int, Field(ge=256, description="Rows per head from which on a layer is sparse (auto).")
    ] = 8192
    max_density: Annotated[
        float,
        Field(gt=0, le=1, description="Share of a head's cells above which it is computed whole."),
    ] = 0.6

    @property
    def enabled(self) -> bool:
        """True if a block may attend to anything else than its active rows."""
        return self.sparse != "off" or self.attend == "stored"

    def is_sparse(self, tokens: int, rows: int) -> bool:
        """Check if a pass of `tokens` new tokens over `rows` rows per head is sparse in a layer."""
        if self.sparse == "off" or tokens < _MIN_TOKENS:
            return False
        return self.sparse == "on" or rows >= self.min_rows
