"""Sizes of a worker that is measured, alike in all of its processes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A worker of one process or of several ranks.

    Attributes:
        model: Folder of its model.
        threads: Threads of each process.
        budget: Rows per head of a session with the default method.
        rows: Rows per head of the longest session.
        block: Tokens of a block of a prompt.
        native_steps: False: a single process decodes layer by layer, as ranks always do.
    """

    model: str
    threads: int
    budget: int
    rows: int
    block: int
    native_steps: bool = True
