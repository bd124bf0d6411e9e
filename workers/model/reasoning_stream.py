"""The reasoning at an answer's beginning, as the answer's text arrives."""

from collections.abc import Sequence


class ReasoningStream:
    """Splits a text that arrives in pieces into a reasoning and what follows it.

    White space around the reasoning is neither's. Only what may be part of a mark is looked at
    again with the next piece.

    Attributes:
        active: True while the answer reasons; None before that is known.
    """

    def __init__(self, marks: tuple[str, str] | None, active: bool | None) -> None:
        """Follow a reasoning between two marks; None: there is none.

        active: whether the text begins within the reasoning; None if it tells itself.
        """
        self._opening, self._closing = marks or ("", "")
        self.active: bool | None = active if marks else False
        self._closed = False
        self._begun = False
        self._window = ""
        self._space: list[str] = []  # may be at the reasoning's end, or before its mark
        self._sent: list[str] = []

    @property
    def text(self) -> str:
        """The reasoning that was returned so far."""
        return "".join(self._sent)

    @property
    def window(self) -> int:
        """Number of characters that are looked at again with the next piece."""
        return len(self._window)

    def push(self, piece: str) -> tuple[str, str]:
        """Add a piece; returns what it adds to the reasoning, and to the text behind it."""
        if self.active is None:
            piece = self._begin(piece)
        if self.active is None:
            return "", ""
        if self.active:
            return self._reason(piece)
        if self._closed and not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        return "", piece

    def finish(self) -> tuple[str, str]:
        """End a reasoning that was cut off, or a text that may only have begun with one."""
        if self.active:
            return self._send(self._window), ""
        rest = "" if self.active is False else "".join(self._space) + self._window
        self.active = False
        return "", rest

    def _begin(self, piece: str) -> str:
        """Look for the opening mark; returns the text behind it, or all if there is none."""
        text = self._window + piece
        start = 0 if self._window else len(text) - len(text.lstrip())
        self._space.append(text[:start])
        text = text[start:]
        self._window = ""
        if text.startswith(self._opening):
            self.active = True
            self._space.clear()
            return text[len(self._opening) :]
        if self._opening.startswith(text):
            self._window = text
            return ""
        self.active = False
        return "".join(self._space) + text

    def _reason(self, piece: str) -> tuple[str, str]:
        text = self._window + piece
        at = text.find(self._closing)
        if at < 0:
            at = end_before(text, (self._closing,))
            self._window = text[at:]
            return self._send(text[:at]), ""
        self._window = ""
        self.active = False
        self._closed = True
        return self._send(text[:at]), self.push(text[at + len(self._closing) :])[1]

    def _send(self, text: str) -> str:
        """Return the reasoning up to the end of `text`, without white space at its ends."""
        if not self._sent:
            text = text.lstrip()
        words = text.rstrip()
        if not words:
            self._space.append(text)
            return ""
        piece = "".join(self._space) + words
        self._space = [text[len(words) :]]
        self._sent.append(piece)
        return piece


def end_before(text: str, delimiters: Sequence[str]) -> int:
    """End of the text that none of the delimiters can begin in."""
    overlap = max(
        (
            n
            for delimiter in delimiters
            for n in range(1, len(delimiter))
            if text.endswith(delimiter[:n])
        ),
        default=0,
    )
    return len(text) - overlap
