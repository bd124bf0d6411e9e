"""The text of tool calls as it arrives, and what is read of it.

Readers are generators: each `yield` waits for more text. So one reader serves a call that arrives
in any pieces, and a whole one.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from workers.model.reasoning_stream import end_before

T = TypeVar("T")
Reading = Generator[None, None, T]
Send = Callable[[str], None]

_SPACE = " \t\n\r"


class Malformed(Exception):
    """The text is not of the form that is read."""


class Ended(Malformed):
    """The text ended before the form did."""


class CallSource:
    """Text that arrives in pieces, and the place up to which it was read.

    Text from `keep` on can be read again.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept = 0
        self._dropped = 0
        self.ended = False

    @property
    def place(self) -> int:
        """Characters that were read since the beginning."""
        return self._dropped + self._at

    @property
    def unread(self) -> str:
        """What has arrived and was not read."""
        return self._text[self._at :]

    @property
    def waiting(self) -> int:
        """Characters that have arrived and were not read."""
        return len(self._text) - self._at

    def push(self, piece: str) -> None:
        """Add text."""
        self._text = self._text[self._kept :] + piece
        self._at -= self._kept
        self._dropped += self._kept
        self._kept = 0

    def keep(self) -> None:
        """Keep what comes from here on."""
        self._kept = self._at

    def rewind(self) -> None:
        """Go back to where `keep` was called last."""
        self._at = self._kept

    def take(self, count: int) -> str:
        """Take so many characters that have arrived."""
        self._at += count
        return self._text[self._at - count : self._at]

    def take_matched(self, pattern: re.Pattern[str]) -> str:
        """Take what a pattern matches of the text that has arrived."""
        matched = pattern.match(self._text, self._at)
        return self.take(matched.end() - self._at if matched else 0)

    def take_before(self, delimiter: str) -> tuple[str, bool]:
        """Take the text before a delimiter, or what cannot be its beginning; True if it is there."""
        at = self._text.find(delimiter, self._at) if delimiter else -1
        if at >= 0:
            return self.take(at - self._at), True
        rest = self.unread
        return self.take(len(rest) if self.ended else end_before(rest, (delimiter,))), False

    def peek(self) -> Reading[str]:
        """Wait for a character; it is not taken. Raises Ended."""
        while self._at == len(self._text):
            if self.ended:
                raise Ended
            yield
        return self._text[self._at]

    def peek_word(self) -> Reading[str]:
        """Take white space and wait for the character behind it; empty if the text ends there."""
        while self._at < len(self._text) or not self.ended:
            if self._at < len(self._text) and self._text[self._at] not in _SPACE:
                return self._text[self._at]
            if self._at < len(self._text):
                self._at += 1
            else:
                yield
        return ""

    def take_if(self, char: str) -> Reading[bool]:
        """Take white space, and the character behind it if it is this one."""
        found = (yield from self.peek_word()) == char
        self._at += found
        return found

    def expect(self, text: str) -> Reading[None]:
        """Take white space and this text behind it. Raises Malformed."""
        yield from self.expect_one((text,))

    def expect_one(self, texts: Sequence[str]) -> Reading[str]:
        """Take white space and the one of these texts that is behind it. Raises Malformed.

        None of the texts is the beginning of another one.
        """
        if not (yield from self.peek_word()):
            raise Ended
        taken = ""
        while taken not in texts:
            taken += yield from self.peek()
            if not any(text.startswith(taken) for text in texts):
                raise Malformed
            self._at += 1
        return taken

    def read_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the text that a pattern of single characters matches. Raises Ended within it."""
        found = ""
        while True:
            found += self.take_matched(pattern)
            if self.waiting:
                return found
            if self.ended:
                raise Ended
            yield

    def read_until(self, delimiters: Sequence[str], send: Send) -> Reading[str]:
        """Pass on the text before the first of the delimiters; returns it, not taken. Raises Ended."""
        while True:
            found = [
                (at, each) for each in delimiters if (at := self._text.find(each, self._at)) >= 0
            ]
            if found:
                send(self.take(min(found)[0] - self._at))
                return min(found)[1]
            rest = self.unread
            send(self.take(end_before(rest, delimiters)))
            if self.ended:
                raise Ended
            yield
