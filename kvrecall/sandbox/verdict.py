"""Outcome of compiling a grammar."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """The outcome of compiling a grammar.

    Attributes:
        problem: Why it cannot be compiled, for its client; empty if it can.
        cpu_seconds: CPU seconds that it took now: 0 where the outcome was known.
        memory_bytes: Memory that compiling it took at most.
        exhausted: It needs more time, memory or text than a grammar may.
    """

    problem: str = ""
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    exhausted: bool = False


class SandboxBusy(Exception):
    """A grammar was not compiled, for reasons that are not its own; come again later.

    `cpu_seconds`: what the attempt took.
    """

    def __init__(self, message: str, cpu_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.cpu_seconds = cpu_seconds
