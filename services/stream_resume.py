"""Resumption of a client's stream after failover to another worker."""

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import ToolCall
from services.turn_stream import Publish, TextDelta, ToolCallEmitted


class StreamResumer:
    """Publishes an answer once, however often it is generated again.

    Suppresses the prefix that was already sent. Turns are seeded and a session's state is the same
    in every worker, so a retry that diverges from that prefix is a fault that the reader must learn
    of.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._sent_text = ""
        self._sent_calls: list[ToolCall] = []
        self._text = ""
        self._n_calls = 0
        self.attempts = 0
        self.diverged = False

    def begin(self) -> None:
        """Start an attempt, the first one or a retry."""
        self.attempts += 1
        self._text = ""
        self._n_calls = 0

    def text(self, piece: str) -> None:
        """Publish the part of `piece` that was not sent yet.

        Raises WorkerLost when the answer diverges.
        """
        start = len(self._text)
        self._text += piece
        n_sent = len(self._sent_text)
        if start >= n_sent:
            self._sent_text = self._text
            self._publish(TextDelta(piece))
            return
        self._check(self._sent_text.startswith(self._text[:n_sent]))
        if len(self._text) > n_sent:
            self._sent_text = self._text
            self._publish(TextDelta(self._text[n_sent:]))

    def call(self, call: ToolCall) -> None:
        """Publish a tool call unless it was sent. Raises WorkerLost when the answer diverges."""
        self._n_calls += 1
        if self._n_calls > len(self._sent_calls):
            self._sent_calls.append(call)
            self._publish(ToolCallEmitted(call))
            return
        self._check(self._sent_calls[self._n_calls - 1] == call)

    def end(self) -> None:
        """Check that the attempt is complete.

        Raises WorkerLost when more than that was sent before.
        """
        self._check(
            len(self._text) == len(self._sent_text) and self._n_calls == len(self._sent_calls)
        )

    def _check(self, same: bool) -> None:
        if not same:
            self.diverged = True
            raise WorkerLost(
                "the worker was lost in the middle of the turn, and the retry on another worker "
                "generated a different answer; send the turn again"
            )
