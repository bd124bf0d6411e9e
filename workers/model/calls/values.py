"""Values within tool calls, in the ways that forms write them; they are passed on as JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from workers.model.calls.source import CallSource, Malformed, Reading, Send

_MAX_DEPTH = 64
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]*")
_SCALAR = re.compile(r"[-+.\w]*")
_BARE_KEY = re.compile(r"[\w.-]*")
_HEX = re.compile("[0-9a-fA-F]+")
_JSON_ESCAPES = dict(zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True))
_PYTHON_ESCAPES = dict(zip("\"\\'abfnrtv0", "\"\\'\a\b\f\n\r\t\v\0", strict=True)) | {"\n": ""}


@dataclass(frozen=True)
class Values:
    """How a form writes values; the default is JSON.

    Values are passed on as `json.dumps` writes them, without escapes of characters that need none,
    whatever spaces and escapes they came with: each string in the pieces that it came in, numbers
    and words whole.

    - `quotes`: characters around strings that have escapes; `raw_quotes`: texts around such without.
    - `escapes`: what stands for a character behind a backslash; `digits`: letters that so many
      hexadecimal digits of a character follow; `lenient`: a backslash before any other is one.
    - `words`: words that JSON has not.
    - `bare_keys`: members have names without quotes.
    """

    quotes: str = '"'
    raw_quotes: tuple[str, ...] = ()
    escapes: Mapping[str, str] = field(default_factory=lambda: _JSON_ESCAPES)
    digits: Mapping[str, int] = field(default_factory=lambda: {"u": 4})
    lenient: bool = False
    words: Mapping[str, str] = field(default_factory=dict)
    bare_keys: bool = False

    def read_text(self, source: CallSource) -> Reading[str]:
        """Take a string. Raises Malformed."""
        pieces: list[str] = []
        if not (yield from self._pass_string(source, pieces.append)):
            raise Malformed
        return str(json.loads("".join(pieces)))

    def read_key(self, source: CallSource) -> Reading[str]:
        """Take the name of a member or of an argument. Raises Malformed."""
        yield from source.peek_word()
        if self.bare_keys and (key := (yield from source.read_while(_BARE_KEY))):
            return key
        return (yield from self.read_text(source))

    def pass_value(self, source: CallSource, send: Send, depth: int = 0) -> Reading[None]:
        """Pass on a value. Raises Malformed, as for one that is nested too deeply."""
        opening = yield from source.peek_word()
        if depth > _MAX_DEPTH:
            raise Malformed
        if opening in ("{", "["):
            yield from self._pass_items(source, opening, send, depth)
        elif not (yield from self._pass_string(source, send)):
            word = yield from source.read_while(_SCALAR)
            send(_write_scalar(self.words.get(word, word)))

    def _pass_items(
        self, source: CallSource, opening: str, send: Send, depth: int
    ) -> Reading[None]:
        """Pass on an object or an array."""
        source.take(1)
        send(opening)
        closing = "}" if opening == "{" else "]"
        more = not (yield from source.take_if(closing))
        while more:
            if opening == "{":
                send(json.dumps((yield from self.read_key(source)), ensure_ascii=False))
                yield from source.expect(":")
                send(": ")
            yield from self.pass_value(source, send, depth + 1)
            more = yield from source.take_if(",")
            if more:
                send(", ")
            else:
                yield from source.expect(closing)
        send(closing)

    def _pass_string(self, source: CallSource, send: Send) -> Reading[bool]:
        """Pass on a string, if one begins here."""
        opening = yield from source.peek_word()
        for quote in self.raw_quotes:
            if opening == quote[0]:
                yield from source.expect(quote)
                send('"')
                yield from source.read_until((quote,), lambda text: send(write_text(text)))
                source.take(len(quote))
                send('"')
                return True
        if not opening or opening not in self.quotes:
            return False
        source.take(1)
        send('"')
        yield from self._pass_escaped(source, opening, send)
        send('"')
        return True

    def _pass_escaped(self, source: CallSource, quote: str, send: Send) -> Reading[None]:
        """Pass on a string up to its quote. A line break that should have been escaped is."""
        while True:
            if plain := source.take_matched(_PLAIN):
                send(write_text(plain))
                continue
            char = yield from source.peek()
            source.take(1)
            if char == quote:
                return
            send(write_text((yield from self._read_escape(source)) if char == "\\" else char))

    def _read_escape(self, source: CallSource) -> Reading[str]:
        """Read what follows a backslash. Half of a pair of surrogates becomes U+FFFD."""
        text = yield from self._read_character(source)
        while "\ud800" <= text[-1:] < "\udc00" and (yield from source.peek()) == "\\":
            source.take(1)
            text += yield from self._read_character(source)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _read_character(self, source: CallSource) -> Reading[str]:
        """Read an escape behind its backslash: a character, or half of a pair of surrogates."""
        yield from source.peek()
        char = source.take(1)
        if char in self.digits:
            digits = ""
            for _ in range(self.digits[char]):
                yield from source.peek()
                digits += source.take(1)
            if not _HEX.fullmatch(digits) or int(digits, 16) > 0x10FFFF:
                raise Malformed
            return chr(int(digits, 16))
        if char not in self.escapes:
            if not self.lenient:
                raise Malformed
            return f"\\{char}"
        return self.escapes[char]


JSON = Values()
PYTHON = Values(
    quotes="'\"",
    escapes=_PYTHON_ESCAPES,
    digits={"u": 4, "x": 2, "U": 8},
    lenient=True,
    bare_keys=True,
    words={"True": "true", "False": "false", "None": "null"},
)


def write_text(text: str) -> str:
    """Write a part of a string as `json.dumps` does."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def write_value(text: str) -> str:
    """Write a value as JSON, or as a text where it is none."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _write_scalar(text: str) -> str:
    """Write a number or a word. Raises Malformed."""
    try:
        return json.dumps(json.loads(text), allow_nan=False)
    except ValueError as error:
        raise Malformed from error
