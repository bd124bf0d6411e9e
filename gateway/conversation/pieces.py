"""The calls of a streamed answer, as all APIs tell of them: begun, added to, ended."""

from dataclasses import dataclass

from services.streams.turn import ArgumentsDelta, ToolCallEmitted


@dataclass(frozen=True)
class CallPiece:
    """A piece of call number `index`, with the text that it adds to the arguments.

    `begins`: it is the call's first; `whole`: all its arguments, if it is the last.
    """

    index: int
    id: str
    name: str
    arguments: str
    begins: bool
    whole: str | None = None


class CallProgress:
    """Follows the calls of one answer, whether their arguments come in pieces or whole."""

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0

    def add(self, progress: ArgumentsDelta | ToolCallEmitted) -> CallPiece:
        """Return the piece that a piece of progress stands for."""
        if isinstance(progress, ArgumentsDelta):
            begins = progress.index == self._begun
            self._begun += begins
            return CallPiece(progress.index, progress.id, progress.name, progress.arguments, begins)
        call, index = progress.call, self._ended
        begins = index == self._begun
        self._begun += begins
        self._ended += 1
        rest = call.arguments if begins else ""
        return CallPiece(index, call.id, call.name, rest, begins, call.arguments)
