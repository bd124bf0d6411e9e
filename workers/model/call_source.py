"""The text of tool calls as it arrives: what is read of it, and the JSON values in it.

Readers are generators: each `yield` waits for more text. So one reader serves a call that arrives
in any pieces, and a whole one.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from workers.model.reasoning_stream import end_before

T = TypeVar("T")
Reading = Generator[None, None, T]
Send = Callable[[str], None]

_MAX_DEPTH = 64
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.\w]*")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile("[0-9a-fA-F]{4}")
_SPACE = " \t\n\r"


class Malformed(Exception):
    """The text is not of the form that is read."""


class Ended(Malformed):
    """The text ended before the form did."""


class CallSource:
    """Text that arrives in pieces, and the place up to which it was read.

    Text from `kept` on can be read again. JSON values are passed on as `json.dumps` writes them,
    without escapes of characters that need none, whatever spaces and escapes they came with: each
    string in the pieces that it came in, numbers and words whole.
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
        if not (yield from self.peek_word()):
            raise Ended
        for char in text:
            if (yield from self.peek()) != char:
                raise Malformed
            self._at += 1

    def read_while(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the text that a pattern of single characters matches. Raises Ended within it."""
        found = ""
        while True:
            matched = pattern.match(self._text, self._at)
            found += self.take(matched.end() - self._at if matched else 0)
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

    def read_text(self) -> Reading[str]:
        """Take a JSON string. Raises Malformed."""
        pieces: list[str] = []
        yield from self._pass_string(pieces.append)
        return str(json.loads("".join(pieces)))

    def pass_value(self, send: Send, depth: int = 0) -> Reading[None]:
        """Pass on a JSON value. Raises Malformed, as for one that is nested too deeply."""
        opening = yield from self.peek_word()
        if depth > _MAX_DEPTH:
            raise Malformed
        if opening == '"':
            yield from self._pass_string(send)
        elif opening in ("{", "["):
            yield from self._pass_items(opening, send, depth)
        else:
            send(_write_scalar((yield from self.read_while(_SCALAR))))

    def _pass_items(self, opening: str, send: Send, depth: int) -> Reading[None]:
        """Pass on an object or an array."""
        self.take(1)
        send(opening)
        closing = "}" if opening == "{" else "]"
        more = not (yield from self.take_if(closing))
        while more:
            if opening == "{":
                yield from self._pass_string(send)
                yield from self.expect(":")
                send(": ")
            yield from self.pass_value(send, depth + 1)
            more = yield from self.take_if(",")
            if more:
                send(", ")
            else:
                yield from self.expect(closing)
        send(closing)

    def _pass_string(self, send: Send) -> Reading[None]:
        """Pass on a string. A line break that should have been escaped is."""
        yield from self.expect('"')
        send('"')
        while True:
            plain = _PLAIN.match(self._text, self._at)
            if plain and plain.end() > self._at:
                send(_write_text(self.take(plain.end() - self._at)))
                continue
            char = yield from self.peek()
            self.take(1)
            if char == '"':
                send('"')
                return
            send(_write_text((yield from self._read_escape()) if char == "\\" else char))

    def _read_escape(self) -> Reading[str]:
        """Read what follows a backslash. Half of a pair of surrogates becomes U+FFFD."""
        text = yield from self._read_character()
        while "\ud800" <= text[-1] < "\udc00" and (yield from self.peek()) == "\\":
            self.take(1)
            text += yield from self._read_character()
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _read_character(self) -> Reading[str]:
        """Read an escape behind its backslash: a character, or half of a pair of surrogates."""
        yield from self.peek()
        char = self.take(1)
        if char != "u":
            if char not in _ESCAPES:
                raise Malformed
            return _ESCAPES[char]
        digits = ""
        for _ in range(4):
            yield from self.peek()
            digits += self.take(1)
        if not _HEX.fullmatch(digits):
            raise Malformed
        return chr(int(digits, 16))


def _write_text(text: str) -> str:
    """Write a part of a string as `json.dumps` does."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _write_scalar(text: str) -> str:
    """Write a number or a word. Raises Malformed."""
    try:
        return json.dumps(json.loads(text), allow_nan=False)
    except ValueError as error:
        raise Malformed from error
