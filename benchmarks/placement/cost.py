"""The cost model: what a turn's tokens take, by where they are found."""

from dataclasses import dataclass

from benchmarks.placement.traces import BLOCK_TOKENS


@dataclass(frozen=True)
class Found:
    """Tokens of a prompt by where they were found; the rest is computed."""

    ram: int
    files: int
    shared: int
    computed: int


@dataclass(frozen=True)
class Cost:
    """Tokens a second of a worker's prefill and of its reads, and seconds of a decoding step."""

    prefill: float
    files: float
    shared: float
    step_seconds: float

    def load_seconds(self, found: Found) -> float:
        """Seconds until what lies in files and in the shared tier is in memory."""
        return found.files / self.files + found.shared / self.shared

    def prefill_seconds(self, found: Found) -> float:
        """Seconds of the model for the tokens that are computed."""
        return found.computed / self.prefill


def count_tokens(blocks: int) -> int:
    """Tokens of whole blocks."""
    return blocks * BLOCK_TOKENS
