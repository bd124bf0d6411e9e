"""What the run needs of a peer: a server process that can be killed, and one session on it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.peers.conversation import Message, Turn

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Reply:
    """A reply of up to so many tokens: seconds to its first token, and from there to its last.

    `after` are seconds that the peer needs behind the reply before it could be killed, for a copy
    of its state.
    """

    text: str
    tokens: int
    first_token: float
    decode: float
    after: float = 0.0


class Peer(Protocol):
    """A session on a server process of its own."""

    def start(self) -> None:
        """Start the server process, for the first time or after `kill`; return when it is ready."""
        ...

    def call(self, messages: Sequence[Message]) -> None:
        """Append the messages up to a tool's pause, with the first ones the session's system line."""
        ...

    def pause(self, turn: Turn, call_id: str) -> bool:
        """Let a tool's pause pass; True if the peer has got the tool's result meanwhile."""
        ...

    def ask(self, messages: Sequence[Message], max_tokens: int) -> Reply:
        """Append messages, generate a reply greedily."""
        ...

    def kill(self) -> None:
        """End the server process with SIGKILL; nothing for one that does not run."""
        ...

    @property
    def pid(self) -> int:
        """Process id of the server."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the session so far."""
        ...

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the peer's libraries."""
        ...


def process_environment(threads: int) -> dict[str, str]:
    """Environment of a peer's process: so many threads, nothing downloaded."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
