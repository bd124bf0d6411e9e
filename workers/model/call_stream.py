"""An answer's text as it arrives, split into what is plain and its calls."""

from collections.abc import Sequence
from typing import Any

from workers.model.answer_format import AnswerFormat
from workers.model.calls.sink import CallPiece, CallSink, ParsedCall
from workers.model.calls.source import CallSource, Ended, Malformed, Reading
from workers.model.calls.tools import get_name


class CallStream:
    """Splits a text that arrives in pieces into plain text and calls.

    A call is begun where its arguments begin, under a name that is known, and from there on it stays
    one: if it is cut off or malformed, the call ends with the arguments that it has. What is
    malformed before is plain text. Plain text behind a call comes with the end.
    """

    def __init__(self, form: AnswerFormat, tools: Sequence[Any], *, enabled: bool) -> None:
        """Follow an answer of this form; enabled: False leaves calls in the text."""
        self._form = form
        self._tools = tools
        self._mark = form.mark if enabled else ""
        self._bare = form.bare if enabled else ""
        self._source = CallSource()
        self._sink = CallSink()
        self._reading: Reading[None] | None = None
        self._begun = 0  # calls that were begun before what is read
        self._opening = ""  # the mark before it
        self._plain: list[str] = []
        self._behind: list[str] = []
        self._said: list[str] = []
        self._marked: int | None = None  # the end of the first mark

    @property
    def text(self) -> str:
        """All plain text so far."""
        return "".join(self._said)

    @property
    def calls(self) -> Sequence[ParsedCall]:
        """The calls that have ended."""
        return self._sink.calls

    @property
    def in_call(self) -> bool:
        """True behind the mark of a call, unless what follows it has turned out to be text."""
        return self._reading is not None or self._sink.begun > 0

    @property
    def since_mark(self) -> int | None:
        """Number of characters that have come since the first mark of a call; None without one."""
        come = self._source.place + self._source.waiting
        return None if self._marked is None else come - self._marked

    @property
    def waiting(self) -> int:
        """Number of characters that are looked at again with the next piece."""
        return self._source.waiting

    def push(self, piece: str) -> tuple[str, tuple[CallPiece, ...]]:
        """Add a piece; returns plain text, and what it adds to calls behind that."""
        if self._sink.begun > self._begun or self._reading is None:
            self._source.keep()  # what is begun is not read again
        self._source.push(piece)
        while self._advance():
            pass
        plain, self._plain = "".join(self._plain), []
        return plain, self._sink.take()

    def finish(self) -> tuple[tuple[CallPiece, ...], str]:
        """End the text; returns what that adds to calls, and the plain text behind them."""
        self._source.ended = True
        plain, pieces = self.push("")
        return pieces, plain + "".join(self._behind).rstrip()

    def _advance(self) -> bool:
        """Read on; returns False when there is nothing more to read."""
        if self._reading is None:
            return self._look_for_call()
        try:
            next(self._reading)
        except StopIteration:
            self._reading = None
        except Malformed as error:
            self._break_off(ended=isinstance(error, Ended))
        else:
            return False
        return True

    def _look_for_call(self) -> bool:
        if self._bare and (word := self._source.unread.lstrip()):
            begins, self._bare = word[0] in self._bare, ""
            if begins:
                self._read("", [get_name(tool) for tool in self._tools])
                return True
        text, found = self._source.take_before(self._mark)
        self._add_plain(text)
        if found:
            opening = self._source.take(len(self._mark))
            self._marked = self._source.place if self._marked is None else self._marked
            self._read(opening, None)
        return found

    def _read(self, opening: str, names: Sequence[str] | None) -> None:
        """Read calls behind `opening`; `names`: those that they may have, None for any."""
        assert self._form.read is not None, "a form with a mark can be read"
        self._opening = opening
        self._source.keep()
        self._sink.names = names
        self._begun = self._sink.begun
        self._reading = self._form.read(self._source, self._sink, self._tools)

    def _break_off(self, ended: bool) -> None:
        """End a call that was begun; without one, what was read is text."""
        self._reading = None
        if self._sink.begun == self._begun:
            self._source.rewind()
            self._add_plain(self._opening)
            return
        if self._sink.open:
            self._sink.end(complete=False)
        if ended:
            self._source.take(self._source.waiting)

    def _add_plain(self, text: str) -> None:
        (self._behind if self._sink.begun else self._plain).append(text)
        self._said.append(text)
