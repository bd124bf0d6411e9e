"""Incremental detokenisation of an answer: reasoning, text up to a stop string, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers.decoders import DecodeStream

from workers.model.answer_formats import AnswerFormat
from workers.model.call_parsing import ParsedCall
from workers.model.reasoning_stream import ReasoningStream, end_before
from workers.model.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Piece:
    """What a token completes of an answer's text, and of its reasoning before it."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer's parts."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


class TextStream:
    """An answer's text as its tokens arrive: whole characters only, without reasoning and calls.

    Text that may be the beginning of a stop string, of a tool call or of a mark of reasoning is held
    back; what was sent is never taken back. Stop strings are looked for in the text alone. Only what
    may begin one of these is looked at again: a token costs the same however long the answer is.

    Attributes:
        stopped: True once a stop string was found.
        stop_sequence: The stop string that was found; empty until then.
        body: Where the text behind the reasoning begins in `raw`.
        call_at: Where the first call's mark begins in `raw`; None without one.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: Sequence[str] = (),
        *,
        reasons: bool | None = None,
        calls: bool = True,
        tools: Sequence[Any] = (),
        verbatim: bool = False,
    ) -> None:
        """Start a stream that ends at any of the `stop` strings.

        reasons: whether the prompt ends within the reasoning; None if the answer itself tells.
        calls: False leaves calls in the text; verbatim: the text keeps the white space at its ends.
        """
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._format: AnswerFormat = tokenizer.format
        self._tools = tools
        self._mark = self._format.mark if calls else ""
        self._may_be_bare = self._format.bare and calls
        self._parses = calls
        self._verbatim = verbatim
        self._stop = tuple(stop)
        self._reasoning = ReasoningStream(self._format.reasoning, reasons)
        self._pieces: list[str] = []
        self._length = 0
        self._lengths = [0]
        self._window = ""
        self._begun = False
        self._sent = 0
        self._opening: int | None = None  # of what is not sent before it is parsed
        self.stopped = False
        self.stop_sequence = ""
        self.body = 0
        self.call_at: int | None = None

    @property
    def raw(self) -> str:
        """All that was generated so far, marks included, up to the first stop string."""
        return "".join(self._pieces)

    @property
    def reasoning(self) -> bool | None:
        """True while the answer reasons; None before that is known."""
        return self._reasoning.active

    @property
    def mark_length(self) -> int:
        """Characters of the mark of a call."""
        return len(self._mark)

    @property
    def in_text(self) -> bool:
        """True in plain text: neither in the reasoning nor behind the mark of a call."""
        return self.reasoning is False and self._opening is None

    @property
    def window(self) -> int:
        """Number of characters that are looked at again with the next token."""
        return len(self._window) + self._reasoning.window

    def push(self, token_id: int) -> Piece:
        """Add a token; returns what can be sent now. Sets `stopped` at a stop string."""
        piece = self._decode(token_id)
        self._pieces.append(piece)
        self._length += len(piece)
        self._lengths.append(self._length)
        reasoning, text = self._reasoning.push(piece)
        if not self._begun:
            self.body = self._sent = self._length - len(text)
            self._begun = bool(text)
        return Piece(self._push(text), reasoning)

    def split_at_stop(self) -> tuple[int, str]:
        """Split what is before the stop string: its whole tokens, counted, and the text after them.

        A token without text at the end, such as the first part of a character, is not counted.
        """
        last = max(length for length in self._lengths if length <= self._length)
        return self._lengths.index(last), self.raw[last:]

    def finish(self) -> Piece:
        """Return what was held back but is plain, malformed tool calls included."""
        if self.reasoning is not False:
            reasoning, text = self._reasoning.finish()
            self.body = self._length - len(text)
            return Piece(text, reasoning)
        plain, calls = self._parsed
        return Piece((plain.rstrip() if calls else plain)[self._sent - self.body :])

    def parse(self) -> ParsedAnswer:
        """Return the parts of the whole answer."""
        plain, calls = ("", ()) if self.reasoning else self._parsed
        text = plain if self._verbatim else plain.strip()
        return ParsedAnswer(text, self._reasoning.text, tuple(calls))

    @cached_property
    def _parsed(self) -> tuple[str, Sequence[ParsedCall]]:
        """The text behind the reasoning without its calls, and the calls; once it is complete."""
        text = self.raw[self.body :]
        return self._format.parse_calls(text, self._tools) if self._parses else (text, ())

    def _decode(self, token_id: int) -> str:
        mark = self._tokenizer.mark_texts.get(token_id)
        if mark is not None:
            return mark
        return self._stream.step(self._tokenizer.inner.backend_tokenizer, token_id) or ""

    def _push(self, piece: str) -> str:
        """Add to the text behind the reasoning; returns what can be sent."""
        text = self._window + piece
        start = self._length - len(text)  # its place in `raw`
        if found := [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]:
            at, self.stop_sequence = min(found)
            self.stopped = True
            self._pieces = [self.raw[: start + at]]
            self._length = start + at
            text = text[:at]
        self._find_call(text, start)
        awaited = (*self._stop, self._mark) if self._mark and self.call_at is None else self._stop
        safe = end_before(text, awaited)
        self._window = text[safe:]
        end = min(start + safe, self._length if self._opening is None else self._opening)
        sendable = text[self._sent - start : max(0, end - start)]
        self._sent = max(self._sent, end)
        return sendable

    def _find_call(self, text: str, start: int) -> None:
        """Look for the beginning of a call in a text that is at `start`."""
        if self._may_be_bare and (word := text.lstrip()):
            self._may_be_bare = False
            self._opening = self.body if word.startswith("{") else None
        at = text.find(self._mark) if self._mark and self.call_at is None else -1
        if at >= 0:
            self.call_at = start + at
            self._opening = self.call_at if self._opening is None else self._opening
