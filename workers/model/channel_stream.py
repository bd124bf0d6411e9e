"""An answer of several messages, each on a channel, as its text arrives (gpt-oss' harmony)."""

import re
from enum import Enum, auto

from workers.model.reasoning_stream import end_before

_MESSAGE = "<|message|>"
_BEGINS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
# A header has words, a recipient and marks; what has anything else, or is longer, is text.
_HEADER = re.compile(r"[\w .:=<|>/-]{0,200}")


class _Part(Enum):
    """What is read."""

    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class ChannelStream:
    """Splits a text that arrives in pieces into the reasoning and the text of its messages.

    The headers and ends of messages are neither's. A message on the channel `analysis` reasons. The
    text is that of all others, and calls: these come from the mark of a call on, as they are.

    Attributes:
        gap: What parts the text that was returned last from an earlier message's; None: nothing.
    """

    def __init__(self, call_mark: str) -> None:
        """Follow an answer; `call_mark` is what a call is told by in a message's header."""
        self._call_mark = call_mark
        self._part = _Part.HEADER
        self._header = ""
        self._window = ""
        self._reasoned: list[str] = []
        self._first = True  # of its message
        self._spoke = False
        self.gap: str | None = None

    @property
    def active(self) -> bool | None:
        """True while the answer reasons, False in its text; None in a header."""
        return None if self._part is _Part.HEADER else self._part is _Part.REASONING

    @property
    def text(self) -> str:
        """The reasoning that was returned so far."""
        return "".join(self._reasoned)

    @property
    def window(self) -> int:
        """Number of characters that are looked at again with the next piece."""
        return len(self._window)

    def push(self, piece: str) -> tuple[str, str]:
        """Add a piece; returns what it adds to the reasoning, and to the text.

        The text is a stretch of what was pushed, up to its end or the window: a piece has the end of
        one message at most, as a single character has.
        """
        self.gap = None
        if self._part is _Part.HEADER:
            return self._read_header(piece)
        return self._read_body(piece)

    def finish(self) -> tuple[str, str]:
        """End an answer that was cut off."""
        rest, self._window = self._window, ""
        return self._send(rest)

    def _read_header(self, piece: str) -> tuple[str, str]:
        self._header += piece
        if self._header.endswith(self._call_mark):
            self._begin(_Part.CALL)
            return self._send(self._call_mark)
        if self._header.endswith(_MESSAGE):
            channel = self._header.rpartition("<|channel|>")[2]
            self._begin(_Part.REASONING if channel.startswith("analysis") else _Part.TEXT)
        elif not self._is_header():
            text = self._header
            self._begin(_Part.TEXT)
            return self._send(text)
        return "", ""

    def _is_header(self) -> bool:
        """Whether what was read may be a header's beginning: a prompt may end within a message."""
        begins = (*_BEGINS, _MESSAGE, self._call_mark)
        known = any(
            text.startswith(self._header) or self._header.startswith(text) for text in begins
        )
        return known and _HEADER.fullmatch(self._header) is not None

    def _begin(self, part: _Part) -> None:
        self._part = part
        self._header = ""
        self._first = True

    def _read_body(self, piece: str) -> tuple[str, str]:
        text = self._window + piece
        # A call's own header goes on behind its mark.
        marks = _ENDS if self._part is _Part.CALL else (*_ENDS, *_BEGINS)
        found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
        if not found:
            at = end_before(text, marks)
            self._window = text[at:]
            return self._send(text[:at])
        at, mark = min(found)
        self._window = ""
        sent = self._send(text[:at])
        self._part = _Part.HEADER
        self._header = mark if mark in _BEGINS else ""
        return sent

    def _send(self, text: str) -> tuple[str, str]:
        """Return text as the reasoning's or the answer's, by the message that it is of."""
        if not text or self._part is _Part.HEADER:
            return "", ""
        first, self._first = self._first, False
        if self._part is _Part.REASONING:
            piece = f"\n\n{text}" if first and self._reasoned else text
            self._reasoned.append(piece)
            return piece, ""
        if first and self._spoke:
            self.gap = "" if self._part is _Part.CALL else "\n\n"
        self._spoke = True
        return "", text
