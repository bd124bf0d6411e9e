"""Incremental detokenisation of an answer, with stop strings and without tool calls."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from workers.model.tokenizer import ChatTokenizer
from workers.model.tool_calls import TOOL_CALL_OPEN, parse_tool_calls


class TextStream:
    """An answer's text as its tokens arrive: whole characters only, without tool calls.

    Text that may be the beginning of a stop string or of a tool call is held back.

    Attributes:
        text: The whole text so far, up to the first stop string.
        stopped: True once a stop string was found.
        stop_sequence: The stop string that was found; empty until then.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Sequence[str] = ()) -> None:
        """Start a stream that ends at any of the `stop` strings."""
        self._tokenizer = tokenizer.inner.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._delimiters = (*stop, TOOL_CALL_OPEN)
        self._stop = tuple(stop)
        self._sent = 0
        self._lengths = [0]
        self.text = ""
        self.stopped = False
        self.stop_sequence = ""

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that can be sent now. Sets `stopped` at a stop string."""
        self.text += self._stream.step(self._tokenizer, token_id) or ""
        self._lengths.append(len(self.text))
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop)) >= 0]
        if found:
            end, self.stop_sequence = min(found)
            self.stopped = True
            self.text = self.text[:end]
        return self._send(self._safe_end())

    def split_at_stop(self) -> tuple[int, str]:
        """Split the text before the stop string: its whole tokens, counted, and the text after them.

        A token without text at the end, such as the first part of a character, is not counted.
        """
        last = max(length for length in self._lengths if length <= len(self.text))
        return self._lengths.index(last), self.text[last:]

    def finish(self) -> str:
        """Return the text that was held back but is plain, malformed tool calls included."""
        _, calls = parse_tool_calls(self.text)
        return self._send(min(self._openings()) if calls else len(self.text))

    def _send(self, end: int) -> str:
        delta = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return delta

    def _openings(self) -> list[int]:
        return [at for at in [self.text.find(TOOL_CALL_OPEN)] if at >= 0]

    def _safe_end(self) -> int:
        """End of the text that no delimiter can begin in."""
        overlap = max(
            (
                n
                for delimiter in self._delimiters
                for n in range(1, len(delimiter))
                if self.text.endswith(delimiter[:n])
            ),
            default=0,
        )
        return min([len(self.text) - overlap, *self._openings()])
