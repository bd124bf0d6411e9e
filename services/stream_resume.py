"""A turn that is run again in another worker, for a reader who has heard the beginning of its answer."""

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import ToolCall


class StreamResumer:
    """What a reader was told of an answer. Said again, it is told from where it broke off; it must begin the same.

    Turns are seeded, and a session's state is the same in every worker: an answer that differs is a fault that the
    reader must learn of.
    """

    def __init__(self) -> None:
        self._text = ""
        self._calls: list[ToolCall] = []
        self._said = ""
        self._made = 0
        self.differs = False

    def begin(self) -> None:
        """The answer begins, for the first time or again."""
        self._said = ""
        self._made = 0

    def text(self, piece: str) -> str | None:
        """What is new of a piece of the answer; None when nothing is. Raises WorkerLost."""
        before = self._said
        self._said = self._said + piece
        known = len(self._text)
        if len(before) >= known:
            self._text = self._said
            return piece
        self._check(self._text.startswith(self._said[:known]))
        self._text = max(self._text, self._said, key=len)
        return self._said[known:] or None

    def call(self, call: ToolCall) -> bool:
        """Whether a call of the answer is new. Raises WorkerLost."""
        self._made += 1
        if self._made > len(self._calls):
            self._calls.append(call)
            return True
        self._check(self._calls[self._made - 1] == call)
        return False

    def end(self) -> None:
        """The answer is whole. Raises WorkerLost when more of it was told before."""
        self._check(len(self._said) == len(self._text) and self._made == len(self._calls))

    def _check(self, same: bool) -> None:
        if not same:
            self.differs = True
            raise WorkerLost(
                "the worker was lost in the middle of the turn, and another one answered otherwise"
            )
