"""The settings of a session's repairs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class RepairSettings:
    """The evicted tokens that a repair promotes: the paper's selection (RepairKV, Algorithm 1) or ours."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    select: Annotated[
        Literal["spread", "bursts"],
        Field(description="Selection: decayed scores around every token, or the paper's bursts."),
    ] = "spread"
    contrast: Annotated[
        float,
        Field(
            ge=0,
            le=8,
            description="Weight of a neutral signal's attention, the chat template around an empty "
            "message, which is subtracted from the signal's; 0: the paper's scores.",
        ),
    ] = 2.0
    swap: Annotated[
        bool,
        Field(
            description="Demote one active row per promoted row, so that no part of the budget is "
            "reserved for repairs."
        ),
    ] = False


@dataclass(frozen=True)
class RepairRule(RepairSettings):
    """The settings with the constants of the selection, which only research replaces.

    - `before`, `after`: neighbours in front of an anchor and behind it, in tokens.
    - `fade_before`, `fade_after`: decay per token there (spread).
    - `turn_tokens`: tokens of a turn that its own repair observes: of a longer one half at its beginning
      and half at its end, where questions are. Its first token waits for them.
    """

    before: int = 2
    after: int = 20
    fade_before: float = 0.8
    fade_after: float = 0.93
    turn_tokens: int = 256

    @property
    def counts_active(self) -> bool:
        """True if attention to active rows counts, so that an active token can be an anchor."""
        return self.select == "spread"
