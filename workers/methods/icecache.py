"""IceCache: sinks and a window are active; the rest of the budget is retrieved for every token."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from workers.methods.streaming_llm import StreamingLLM
from workers.prefill.settings import Prefill
from workers.retrieval.settings import Retrieval


@dataclass(frozen=True)
class IceCache(StreamingLLM):
    """Sinks, the newest rows, and while decoding the rows that each query attends to most.

    Source: "IceCache" (2026), sections 3 and 4: of 256 rows 32 are sinks, 32 a window and 192
    retrieved.

    Deviations: single rows are retrieved, not pages of 16, and drawn by their weight (`choice`), not
    the best ones; the first two layers are as the others.
    """

    share: Annotated[
        float, Field(gt=0, le=0.9, description="Share of the budget for retrieved rows.")
    ] = 0.75
    prompt_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=256,
            description="Last tokens of a prompt that retrieve too, where it attends to active rows.",
        ),
    ] = 1

    choice: Annotated[
        Literal["sample", "best"],
        Field(
            description="How rows are retrieved: drawn by their weight, or those of most weight."
        ),
    ] = "sample"

    name: ClassVar[str] = "icecache"

    @property
    def prefill(self) -> Prefill:
        """Prompts attend to every stored row: the paper's prefill is dense."""
        return Prefill(attend="stored")

    @property
    def retrieval(self) -> Retrieval:
        """Retrieval of `share` of the budget."""
        return Retrieval(self.share, self.prompt_tokens, self.choice)
