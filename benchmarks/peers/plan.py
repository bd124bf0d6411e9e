"""Sizes of the session, the same for all peers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Sizes of a measurement.

    Attributes:
        model: Name of the model: `smollm2`, `reference`, a folder or a GGUF file.
        data: Recordings whose text is the small talk; empty for generated talk.
        seed: Seed of the conversation.
        turns: Turns with a tool's pause; one question more follows the last restart.
        tokens: Length of the session at its end, about.
        reply_tokens: Largest number of tokens of a reply.
        pause: Seconds of a tool's pause, for those that use it.
        threads: Threads of each peer.
    """

    model: str
    data: tuple[str, ...]
    seed: int
    turns: int
    tokens: int
    reply_tokens: int
    pause: float
    threads: int

    @property
    def restart_at(self) -> int:
        """The turn in whose pause the server is killed."""
        return self.turns // 2

    @property
    def capacity(self) -> int:
        """Rows that hold the whole session, with room for an estimate that is too low."""
        return self.tokens + self.tokens // 16 + 128

    def budget(self, share: int) -> int:
        """Rows per head that are one part in `share` of the session."""
        return self.tokens // share
