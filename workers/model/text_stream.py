"""Incremental detokenisation of an answer: reasoning, text up to a stop string, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from workers.model.call_stream import CallStream
from workers.model.calls.sink import CallPiece, ParsedCall
from workers.model.channel_stream import ChannelStream
from workers.model.reasoning_stream import ReasoningStream, end_before
from workers.model.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Piece:
    """What a token completes of an answer's reasoning, its text behind that, and its calls."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer's parts."""

    text: str
    reasoning: str
    calls: tuple[ParsedCall, ...]


class TextStream:
    """An answer as its tokens arrive: reasoning, text in whole characters, and calls.

    Text that may be the beginning of a stop string, of a tool call or of a mark of reasoning is held
    back; what was sent is never taken back. Stop strings are looked for behind the reasoning. Only
    what may begin one of these is looked at again: a token costs the same however long the answer is.

    Attributes:
        stopped: True once a stop string was found.
        stop_sequence: The stop string that was found; empty until then.
        body: Where the text behind the reasoning begins in `raw`.
        call_at: Where the text behind the first mark of a call begins in `raw`; None without one.
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
        calls: False leaves calls in the text; verbatim: the text keeps the white space at its end.
        """
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._verbatim = verbatim
        self._stop = tuple(stop)
        form = tokenizer.format
        self._reasoning: ChannelStream | ReasoningStream = (
            ChannelStream(form.mark)
            if form.channels is not None and reasons is None
            else ReasoningStream(form.reasoning, reasons)
        )
        self._calls = CallStream(form, tools, enabled=calls)
        self._pieces: list[str] = []
        self._length = 0
        self._lengths = [0]
        self._window = ""
        self._begun = False
        self.call_at: int | None = None
        self.stopped = False
        self.stop_sequence = ""
        self.body = 0

    @property
    def raw(self) -> str:
        """All that was generated so far, marks included, up to the first stop string."""
        return "".join(self._pieces)

    @property
    def reasoning(self) -> bool | None:
        """True while the answer reasons; None before that is known."""
        return self._reasoning.active

    @property
    def in_text(self) -> bool:
        """True in plain text: neither in the reasoning nor behind the mark of a call."""
        return self.reasoning is False and not self._calls.in_call

    @property
    def window(self) -> int:
        """Number of characters that are looked at again with the next token."""
        return len(self._window) + self._reasoning.window + self._calls.waiting

    def push(self, token_id: int) -> Piece:
        """Add a token; returns what can be sent now. Sets `stopped` at a stop string."""
        piece = self._decode(token_id)
        self._pieces.append(piece)
        self._lengths.append(self._length + len(piece))
        # Of several messages, a piece may have the end of one and the beginning of another.
        stretches = piece if isinstance(self._reasoning, ChannelStream) else (piece,)
        found = [self._add(stretch) for stretch in stretches if not self.stopped]
        return Piece(
            "".join(each.text for each in found),
            "".join(each.reasoning for each in found),
            tuple(call for each in found for call in each.calls),
        )

    def _add(self, piece: str) -> Piece:
        """Add a stretch of the answer; returns what can be sent now."""
        self._length += len(piece)
        reasoning, text = self._reasoning.push(piece)
        if not self._begun:
            self.body = self._length - self._reasoning.window - len(text)
            self._begun = bool(text)
        before = ""
        if isinstance(self._reasoning, ChannelStream) and self._reasoning.gap is not None:
            # What was held is no part of a stop string any more.
            before, self._window = self._window + self._reasoning.gap, ""
        plain, calls = self._calls.push(before + self._cut_at_stop(text))
        if self.call_at is None and (since := self._calls.since_mark) is not None:
            self.call_at = self._length - self._reasoning.window - len(self._window) - since
        return Piece(plain, reasoning, calls)

    def split_at_stop(self) -> tuple[int, str]:
        """Split what is before the stop string: its whole tokens, counted, and the text after them.

        A token without text at the end, such as the first part of a character, is not counted.
        """
        last = max(length for length in self._lengths if length <= self._length)
        return self._lengths.index(last), self.raw[last:]

    def finish(self) -> tuple[Piece, ...]:
        """Return what was held back, in order: text, ends of calls, text behind these."""
        reasoning, rest = self._reasoning.finish()
        text = self._window + rest
        if not self._begun:
            self.body = self._length - len(text)
        plain, calls = self._calls.push(text)
        last, behind = self._calls.finish()
        pieces = (Piece(plain, reasoning, calls + last), Piece(behind))
        return tuple(piece for piece in pieces if piece != Piece())

    def parse(self) -> ParsedAnswer:
        """Return the parts of the whole answer, once it is finished."""
        text = self._calls.text
        text = text if self._verbatim else text.rstrip()
        return ParsedAnswer(text, self._reasoning.text, tuple(self._calls.calls))

    def _decode(self, token_id: int) -> str:
        mark = self._tokenizer.mark_texts.get(token_id)
        if mark is not None:
            return mark
        return self._stream.step(self._tokenizer.inner.backend_tokenizer, token_id) or ""

    def _cut_at_stop(self, piece: str) -> str:
        """Add to the text behind the reasoning; returns what can be no part of a stop string."""
        text = self._window + piece
        start = self._length - self._reasoning.window - len(text)  # its place in `raw`
        if found := [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]:
            at, self.stop_sequence = min(found)
            self.stopped = True
            self._pieces = [self.raw[: start + at]]
            self._length = start + at
            text = text[:at]
        safe = len(text) if self.stopped else end_before(text, self._stop)
        self._window = text[safe:]
        return text[:safe]
