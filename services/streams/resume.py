"""Resumption of a client's stream after failover to another worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrecall.domain.errors import WorkerLost
from kvrecall.domain.messages import TokenLogprob, ToolCall
from kvrecall.protocol.convert import logprob_from_wire
from kvrecall.protocol.v1 import worker_pb2 as pb
from services.streams.turn import (
    ArgumentsDelta,
    Publish,
    ReasoningDelta,
    TextDelta,
    ToolCallEmitted,
    TurnPlanned,
)


class _Text:
    """A text as it was sent, and how far the running attempt has come in it.

    A piece is compared with its place in what earlier attempts sent: its cost is its own length.
    """

    def __init__(self) -> None:
        self._sent: list[str] = []
        self._earlier = ""
        self._length = 0
        self.same = True

    def begin(self) -> None:
        """Start an attempt."""
        self._earlier = "".join(self._sent)
        self._sent = [self._earlier]
        self._length = 0
        self.same = True

    def add(self, piece: str) -> str:
        """Add a piece to the attempt; returns the part that was not sent yet.

        `same` is False from where the attempt says something else than was sent.
        """
        expected = self._earlier[self._length : self._length + len(piece)]
        fresh = piece[len(expected) :]
        self._length += len(piece)
        self.same = self.same and piece.startswith(expected)
        if self.same:
            self._sent.append(fresh)
        return fresh

    @property
    def behind(self) -> bool:
        """True while the attempt has not said all that was sent."""
        return self._length < len(self._earlier)


@dataclass(frozen=True)
class _Call:
    """A call that was begun, and its arguments as they were sent."""

    id: str
    name: str
    arguments: _Text = field(default_factory=_Text)


class StreamResumer:
    """Publishes an answer once, however often it is generated again.

    Suppresses the prefix that was already sent. Turns are seeded and a session's state is the same
    in every worker, so a retry that diverges from that prefix is a fault that the reader must learn
    of.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._text = _Text()
        self._reasoning = _Text()
        self._calls: dict[int, _Call] = {}
        self._sent_calls: list[ToolCall] = []
        self._sent_logprobs = 0
        self._n_calls = 0
        self._n_logprobs = 0
        self._n_tokens = 0
        self._sent_tokens = 0
        self._planned = False
        self.attempts = 0
        self.diverged = False

    def begin(self) -> None:
        """Start an attempt, the first one or a retry."""
        self.attempts += 1
        self._text.begin()
        self._reasoning.begin()
        for call in self._calls.values():
            call.arguments.begin()
        self._n_calls = self._n_logprobs = self._n_tokens = 0

    def planned(self, held_tokens: int, prompt_tokens: int) -> None:
        """Publish the turn's plan unless an earlier attempt had one."""
        if not self._planned:
            self._planned = True
            self._publish(TurnPlanned(held_tokens, prompt_tokens))

    def chunk(self, chunk: pb.TokenChunk) -> None:
        """Publish what is new of a token's text and reasoning. Raises as `text`."""
        self._n_tokens += len(chunk.ids)
        tokens = max(0, self._n_tokens - self._sent_tokens)
        self._sent_tokens += tokens
        if chunk.reasoning:
            self.reasoning(chunk.reasoning, tokens)
            tokens = 0
        if chunk.text or chunk.logprobs or not chunk.reasoning:
            self.text(chunk.text, [logprob_from_wire(each) for each in chunk.logprobs], tokens)

    def text(self, piece: str, logprobs: Sequence[TokenLogprob] = (), tokens: int = 0) -> None:
        """Publish the part of `piece`, and those of its log-probabilities, that were not sent yet.

        `tokens`: those of it that were not. Raises WorkerLost when the answer diverges.
        """
        behind = self._text.behind
        fresh = self._text.add(piece)
        self._check(self._text.same)
        self._n_logprobs += len(logprobs)
        count = max(0, self._n_logprobs - self._sent_logprobs)
        self._sent_logprobs += count
        if fresh or count or not behind:
            self._publish(TextDelta(fresh, tuple(logprobs[len(logprobs) - count :]), tokens))

    def reasoning(self, piece: str, tokens: int = 0) -> None:
        """Publish the part of a piece of reasoning that was not sent yet; as `text`."""
        fresh = self._reasoning.add(piece)
        self._check(self._reasoning.same)
        if fresh:
            self._publish(ReasoningDelta(fresh, tokens))

    def arguments(self, delta: pb.ArgumentsDelta) -> None:
        """Publish the part of a piece of arguments that was not sent yet; as `text`."""
        if delta.index < len(self._sent_calls):
            return  # of a call that was sent whole, which is compared when it ends
        call = self._calls.setdefault(delta.index, _Call(delta.id, delta.name))
        fresh = call.arguments.add(delta.arguments)
        self._check(call.arguments.same and (call.id, call.name) == (delta.id, delta.name))
        if fresh:
            self._publish(ArgumentsDelta(delta.index, delta.id, delta.name, fresh))

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
        behind = self._text.behind or self._reasoning.behind
        calls = max(self._calls, default=-1) + 1
        self._check(not behind and self._n_calls == len(self._sent_calls) >= calls)

    def _check(self, same: bool) -> None:
        if not same:
            self.diverged = True
            raise WorkerLost(
                "the worker was lost in the middle of the turn, and the retry on another worker "
                "generated a different answer; send the turn again"
            )
