"""Incremental detokenisation of an answer: reasoning, text up to a stop string, tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import DecodeStream

from workers.model.answer_formats import AnswerFormat
from workers.model.call_parsing import ParsedCall
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
    back; what was sent is never taken back. Stop strings are looked for in the text alone.

    Attributes:
        raw: All that was generated so far, marks included, up to the first stop string.
        stopped: True once a stop string was found.
        stop_sequence: The stop string that was found; empty until then.
        reasoning: True while the answer reasons; None before that is known.
        body: Where the text behind the reasoning begins in `raw`.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop: Sequence[str] = (),
        *,
        reasons: bool | None = None,
        calls: bool = True,
        tools: Sequence[Any] = (),
    ) -> None:
        """Start a stream that ends at any of the `stop` strings.

        reasons: whether the prompt ends within the reasoning; None if the answer itself tells.
        calls: False leaves calls in the text.
        """
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._format: AnswerFormat = tokenizer.format
        self._tools = tools
        self._mark = self._format.mark if calls else ""
        self._bare = self._format.bare and calls
        self._parses = calls
        self._stop = tuple(stop)
        self._marks = self._format.reasoning
        self._sent = 0
        self._lengths = [0]
        self._reasoned: tuple[int, int] = (0, 0)
        self.raw = ""
        self.stopped = False
        self.stop_sequence = ""
        self.body = 0
        self.reasoning: bool | None = reasons if self._marks else False

    @property
    def call_at(self) -> int | None:
        """Where the first call's mark begins in `raw`; None without one."""
        at = self.raw.find(self._mark, self.body) if self._mark else -1
        return None if at < 0 or self.reasoning is not False else at

    @property
    def mark_length(self) -> int:
        """Characters of the mark of a call."""
        return len(self._mark)

    @property
    def in_text(self) -> bool:
        """True in plain text: neither in the reasoning nor behind the mark of a call."""
        return self.reasoning is False and not self._openings()

    def push(self, token_id: int) -> Piece:
        """Add a token; returns what can be sent now. Sets `stopped` at a stop string."""
        self.raw += self._decode(token_id)
        self._lengths.append(len(self.raw))
        reasoning = self._advance_reasoning()
        if self.reasoning is not False:
            return Piece(reasoning=reasoning)
        found = [(at, stop) for stop in self._stop if (at := self.raw.find(stop, self.body)) >= 0]
        if found:
            end, self.stop_sequence = min(found)
            self.stopped = True
            self.raw = self.raw[:end]
        return Piece(self._send(self._safe_end()), reasoning)

    def split_at_stop(self) -> tuple[int, str]:
        """Split what is before the stop string: its whole tokens, counted, and the text after them.

        A token without text at the end, such as the first part of a character, is not counted.
        """
        last = max(length for length in self._lengths if length <= len(self.raw))
        return self._lengths.index(last), self.raw[last:]

    def finish(self) -> Piece:
        """Return what was held back but is plain, malformed tool calls included."""
        if self.reasoning is not False:
            return self._finish_reasoning()
        plain, calls = self._parse()
        if calls:
            plain = plain.rstrip()
        rest = plain[self._sent - self.body :]
        self._sent = max(self._sent, self.body + len(plain))
        return Piece(rest)

    def parse(self) -> ParsedAnswer:
        """Parse the whole answer, after `finish`."""
        start, end = self._reasoned
        reasoning = self.raw[start:end]
        if self.reasoning is not False:
            return ParsedAnswer("", reasoning, ())
        plain, calls = self._parse()
        return ParsedAnswer(plain.strip(), reasoning, tuple(calls))

    def _decode(self, token_id: int) -> str:
        mark = self._tokenizer.mark_texts.get(token_id)
        if mark is not None:
            return mark
        return self._stream.step(self._tokenizer.inner.backend_tokenizer, token_id) or ""

    def _parse(self) -> tuple[str, list[ParsedCall]]:
        text = self.raw[self.body :]
        return self._format.parse_calls(text, self._tools) if self._parses else (text, [])

    def _advance_reasoning(self) -> str:
        """Follow the reasoning; returns what can be sent of it. Sets where the text begins."""
        if self._marks is None or self.reasoning is False:
            self._skip_space()
            return ""
        opening, closing = self._marks
        if self.reasoning is None:
            start = len(self.raw) - len(self.raw.lstrip())
            if self.raw.startswith(opening, start):
                self.reasoning = True
                self._reasoned = (start + len(opening),) * 2
            elif not opening.startswith(self.raw[start:]):
                self.reasoning = False
                return ""
            else:
                return ""
        start = self._reasoned[0]
        at = self.raw.find(closing, start)
        if at < 0:
            return self._send_reasoning(_end_before(self.raw, (closing,)))
        self.reasoning = False
        self.body = at + len(closing)
        piece = self._send_reasoning(at)
        self._sent = self.body
        self._skip_space()
        return piece

    def _skip_space(self) -> None:
        """Move the text's beginning behind the white space that follows the reasoning."""
        if self.body and self._sent == self.body:
            rest = self.raw[self.body :]
            self.body += len(rest) - len(rest.lstrip())
            self._sent = self.body

    def _send_reasoning(self, end: int) -> str:
        """Send the reasoning up to `end` without white space at its ends."""
        start, sent = self._reasoned
        text = self.raw[start:end]
        if sent == start:
            start += len(text) - len(text.lstrip())
            sent = start
        end = max(sent, start + len(self.raw[start:end].rstrip()))
        self._reasoned = (start, end)
        return self.raw[sent:end]

    def _finish_reasoning(self) -> Piece:
        """Send the end of a reasoning that was cut off, or an answer that only began to."""
        if self.reasoning:
            return Piece(reasoning=self._send_reasoning(len(self.raw)))
        self.reasoning = False
        return Piece(self._send(len(self.raw)))

    def _send(self, end: int) -> str:
        delta = self.raw[self._sent : end]
        self._sent = max(self._sent, end)
        return delta

    def _openings(self) -> list[int]:
        mark = self.call_at
        found = [] if mark is None else [mark]
        text = self.raw[self.body :].lstrip()
        if self._bare and text.startswith("{"):
            found.append(self.body)
        return found

    def _safe_end(self) -> int:
        """End of the text that no delimiter can begin in."""
        delimiters = (*self._stop, self._mark) if self._mark else self._stop
        return max(self._sent, min([_end_before(self.raw, delimiters), *self._openings()]))


def _end_before(text: str, delimiters: Sequence[str]) -> int:
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
