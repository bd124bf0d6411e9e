"""The token ids of a session, for peers that take them: rendered as in a session of kvrecall."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.conversation import Message
from benchmarks.peers.subjects.base import Reply
from workers.model.tokenizer import ChatTokenizer, keep_recent


@dataclass
class History:
    """The token ids of a session. Not thread-safe.

    Attributes:
        token_ids: All of the session.
        last: Where the newest message that is to be replied to begins.
    """

    tokenizer: ChatTokenizer
    token_ids: list[int] = field(default_factory=list)
    last: int = 0
    _recent: list[Message] = field(default_factory=list)

    def append(self, messages: Sequence[Message], *, generate: bool) -> None:
        """Append messages; with `generate` up to where the reply begins."""
        for number, message in enumerate(messages, 1):
            self.last = len(self.token_ids)
            asked = generate and number == len(messages)
            for segment in self.tokenizer.prompt(self._recent, [message], [], asked):
                self.token_ids += segment.token_ids
            self._recent = keep_recent([*self._recent, message])

    def receive_reply(self, tokens: Iterable[int], started: float) -> Reply:
        """Append a reply whose tokens come one after the other; `started` is when it was asked for."""
        token_ids = list[int]()
        moments = list[float]()
        for token in tokens:
            token_ids.append(token)
            moments.append(time.perf_counter() - started)
        first = moments[0] if moments else time.perf_counter() - started
        decode = moments[-1] - first if moments else 0.0
        return Reply(self.append_reply(token_ids), len(token_ids), first, decode)

    def append_reply(self, token_ids: Sequence[int]) -> str:
        """Append a generated reply and its end; returns its text."""
        text = str(self.tokenizer.inner.decode(list(token_ids)))
        self.token_ids += [*token_ids, self.tokenizer.eos_token_ids[0]]
        self._recent = keep_recent([*self._recent, {"role": "assistant", "content": text}])
        return text
