"""The settings of a session's prefill."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

# Of the new tokens of a pass; with fewer, a sample would cost as much as their attention.
_MIN_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class PrefillSettings:
    """What prefilled blocks attend to: active rows, every stored row, or lines of the active rows.

    With `attend` = "stored" a block's rows are those of a full cache, as in the papers on eviction:
    the budget holds for what stays active, and for decoding. `sparse`: vertical and slash lines that
    hold most of a block's attention, after LoopServe section 5.1.
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
        Field(
            description="auto: in layers that hold at least 8,192 rows per head; on: in every layer."
        ),
    ] = "off"
    alpha: Annotated[
        float, Field(gt=0.5, le=1, description="Share of the attention weight to cover.")
    ] = 0.99


@dataclass(frozen=True, kw_only=True)
class Prefill(PrefillSettings):
    """The settings with the constants of the search for lines, which only research replaces.

    The paper covers `alpha` of the weight of the sampled rows, which over-fits: `held_out` of them are
    kept for a check, and lines are added until those are covered as well. `sample` = 48 and
    `held_out` = 0 are the paper's.

    - `sample`: tokens of a block whose attention is computed first.
    - `held_out`: share of the sample that only checks the cover.
    - `sinks`: first tokens that are always attended to.
    - `band`: distances, from 0, that are always attended to.
    - `slash_width`: distances of a slash line; 1 is the paper's.
    - `min_rows`: rows per head from which on a layer is sparse (auto).
    - `max_density`: share of a head's cells above which it is computed whole.
    """

    sample: int = 64
    held_out: float = 0.25
    sinks: int = 4
    band: int = 64
    slash_width: int = 64
    min_rows: int = 8192
    max_density: float = 0.6

    @property
    def enabled(self) -> bool:
        """True if a block may attend to anything else than its active rows."""
        return self.sparse != "off" or self.attend == "stored"

    def is_sparse(self, tokens: int, rows: int) -> bool:
        """Check if a pass of `tokens` new tokens over `rows` rows per head is sparse in a layer."""
        if self.sparse == "off" or tokens < _MIN_TOKENS:
            return False
        return self.sparse == "on" or rows >= self.min_rows
