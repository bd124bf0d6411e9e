"""IceCache: sinks and a window are active; the rest of the budget is retrieved for every token."""

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.domain.settings.methods import IceCacheSettings
from kvrecall.domain.settings.prefill import Prefill
from kvrecall.domain.settings.retrieval import Retrieval
from workers.methods.streaming_llm import StreamingLLM


@dataclass(frozen=True)
class IceCache(IceCacheSettings, StreamingLLM):
    """Sinks, the newest rows, and while decoding the rows that each query attends to most.

    Source: "IceCache" (2026), sections 3 and 4: of 256 rows 32 are sinks, 32 a window and 192
    retrieved.

    Deviations: single rows are retrieved, not pages of 16, and drawn by their weight (`choice`), not
    the best ones; the first two layers are as the others.
    """

    name: ClassVar[str] = "icecache"

    @property
    def prefill(self) -> Prefill:
        """Prompts attend to every stored row: the paper's prefill is dense."""
        return Prefill(attend="stored")

    @property
    def retrieval(self) -> Retrieval:
        """Retrieval of `share` of the budget."""
        return Retrieval(self.share, self.choice)
