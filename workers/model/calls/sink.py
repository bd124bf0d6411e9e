"""The calls that are found in a model's text, as they arrive."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from workers.model.calls.source import CallSource, Malformed, Reading


@dataclass(frozen=True)
class ParsedCall:
    """A tool call in the model's output.

    `arguments` is the JSON text of an object, or its beginning unless the call is `complete`.
    `number`: the one that the model gave it, in forms that number calls; else empty.
    """

    name: str
    arguments: str
    complete: bool = True
    number: str = ""


@dataclass(frozen=True)
class CallPiece:
    """What new text adds to the arguments of call number `index`.

    The first piece of a call begins it. `call`: the whole call, with its last piece.
    """

    index: int
    name: str
    arguments: str
    call: ParsedCall | None = None
    number: str = ""


class CallSink:
    """The calls that were found, and what is new of them.

    Attributes:
        calls: Calls that have ended.
        names: Names that a call may have; None: any.
        open: True within a call's arguments.
    """

    def __init__(self) -> None:
        self.calls: list[ParsedCall] = []
        self.names: Collection[str] | None = None
        self.open = False
        self._name = ""
        self._number = ""
        self._arguments: list[str] = []
        self._taken = 0
        self._pieces: list[CallPiece] = []

    @property
    def begun(self) -> int:
        """Number of calls that were begun."""
        return len(self.calls) + self.open

    def begin(self, name: str, number: str = "") -> None:
        """Begin a call. Raises Malformed for a name that it may not have."""
        if self.names is not None and name not in self.names:
            raise Malformed
        self.open = True
        self._name = name
        self._number = number
        self._arguments = []
        self._taken = 0

    def add(self, text: str) -> None:
        """Add to the arguments of the call."""
        self._arguments.append(text)

    def end(self, *, complete: bool = True) -> None:
        """End the call; one that is not `complete` was cut off or is malformed from here on."""
        call = ParsedCall(self._name, "".join(self._arguments), complete, self._number)
        self._pieces.append(self._take_piece(call))
        self.calls.append(call)
        self.open = False

    def take(self) -> tuple[CallPiece, ...]:
        """Return what is new since the last time."""
        pieces, self._pieces = self._pieces, []
        if self.open and self._taken < len(self._arguments):
            pieces.append(self._take_piece(None))
        return tuple(pieces)

    def _take_piece(self, call: ParsedCall | None) -> CallPiece:
        fresh = "".join(self._arguments[self._taken :])
        self._taken = len(self._arguments)
        return CallPiece(len(self.calls), self._name, fresh, call, self._number)


Reader = Callable[[CallSource, CallSink, Sequence[Any]], Reading[None]]
"""Reads the text behind the mark that opens a call, and begins, adds to and ends the calls there.

It raises Malformed where the text is of another form: what it has begun by then stays a call.
"""
