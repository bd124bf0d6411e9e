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
    before: Annotated[
        int, Field(ge=0, le=256, description="Neighbours in front of an anchor, in tokens.")
    ] = 2
    after: Annotated[
        int, Field(ge=0, le=256, description="Neighbours behind an anchor, in tokens.")
    ] = 20
    fade_before: Annotated[
        float, Field(ge=0, lt=1, description="Decay per token in front of an anchor (spread).")
    ] = 0.8
    fade_after: Annotated[
        float, Field(ge=0, lt=1, description="Decay per token behind an anchor (spread).")
    ] = 0.93
    swap: Annotated[
        bool,
        Field(
            description="Demote one active row per promoted row, so that no part of the budget is "
            "reserved for repairs."
        ),
    ] = False
    turn_tokens: Annotated[
        int,
        Field(
            ge=2,
            description="Tokens of a turn that its own repair observes: of a longer one half at its "
            "beginning and half at its end, where questions are. Its first token waits for them.",
        ),
    ] = 256

    @property
    def counts_active(self) -> bool:
        """True if attention to active rows counts, so that an active token can be an anchor."""
        return self.select == "spread"
