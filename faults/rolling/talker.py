"""A user's client: conversations through the client library, with the retries that it documents."""

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from random import Random
from typing import TypeVar

from faults.load.client import GIVE_UP_SECONDS, NotServedError, is_transient
from faults.load.contest import Contest
from faults.load.counters import Counters
from faults.load.scripts import Json
from faults.rolling.balancer import BalancedTransport, Balancer
from faults.rolling.tally import Tally, Wait
from kvrecall.client import KvrecallClient, KvrecallError, TextDelta

T = TypeVar("T")
TURNS = 10
OUTPUT_TOKENS = 12
STREAMED_SHARE = 0.5
# Attempts of the library: with its backoff, half a minute of refused connections.
RETRIES = 8
# Before the user sends a request again that the library gave up, or a stream that broke.
REPEAT_SECONDS = 1.0
PAUSE_SECONDS = 2.0


@dataclass
class Talker:
    """One client that holds one conversation after another."""

    name: str
    balancer: Balancer
    tally: Tally
    rng: Random
    conversations: list[Contest] = field(default_factory=list)

    def run(self, over: threading.Event) -> None:
        """Talk until `over`; a turn that was begun is brought to its end.

        What ends it before is counted as a failure.
        """
        try:
            self._talk(over)
        except Exception:
            self.tally.fail(f"{self.name}: {traceback.format_exc()}")

    def _talk(self, over: threading.Event) -> None:
        transport = BalancedTransport(self.balancer)
        with KvrecallClient(
            self.balancer.urls[0], max_retries=RETRIES, transport=transport
        ) as client:
            while not over.is_set():
                conversation = Contest(f"{self.name}-{len(self.conversations)}", Counters())
                self.conversations.append(conversation)
                try:
                    self._hold(client, conversation, over)
                except NotServedError as error:
                    self.tally.fail(f"{conversation.name}: {error}")

    def _hold(self, client: KvrecallClient, conversation: Contest, over: threading.Event) -> None:
        created = self._send(f"{conversation.name}-create", lambda: conversation.create(client))
        conversation.session = created["id"]
        for number in range(TURNS):
            text = conversation.opening if number == 0 else self._write(number)
            self._say(client, conversation, text, number)
            if over.wait(self.rng.uniform(0.0, PAUSE_SECONDS)):
                return

    def _write(self, number: int) -> str:
        return f"Turn {number}: the garage of Ben has code {self.rng.randrange(9999)}."

    def _say(self, client: KvrecallClient, conversation: Contest, text: str, number: int) -> None:
        key = f"{conversation.name}-{number}"
        ask = self._stream if self.rng.random() < STREAMED_SHARE else _ask
        conversation.sent[text] = 1  # a key makes all repetitions one request
        conversation.acknowledged[text] = self._send(
            key, lambda: ask(client, conversation, text, key)
        )

    def _send(self, key: str, request: Callable[[], T]) -> T:
        """Send a request with a key, and again with the same key, until it is answered.

        Raises NotServedError.
        """
        start = time.monotonic()
        while True:
            try:
                answer = request()
            except KvrecallError as error:
                text = error.code if error.status < 400 else f"{error.status} {error.code}"
                self.tally.repeat(key, time.monotonic(), text)
                if not is_transient(error) or time.monotonic() > start + GIVE_UP_SECONDS:
                    raise NotServedError(f"{key}: {error}") from error
                time.sleep(REPEAT_SECONDS)
            else:
                self.tally.answer(key, Wait(start, time.monotonic() - start, self.name))
                return answer

    def _stream(self, client: KvrecallClient, conversation: Contest, text: str, key: str) -> Json:
        """Answer of a streamed turn, whose deltas are to be its text."""
        stream = client.stream(
            conversation.session,
            conversation.messages(text),
            max_tokens=OUTPUT_TOKENS,
            queue=True,
            key=key,
        )
        heard = "".join(event.text for event in stream if isinstance(event, TextDelta))
        answer = asdict(stream.read())
        # A message has no white space at its ends, of which a stream cannot know.
        if heard.strip() != (answer["message"]["content"] or "").strip():
            self.tally.fail(f"{key}: streamed {heard!r}, answered {answer['message']['content']!r}")
        return answer


def _ask(client: KvrecallClient, conversation: Contest, text: str, key: str) -> Json:
    messages = conversation.messages(text)
    return asdict(
        client.turn(conversation.session, messages, max_tokens=OUTPUT_TOKENS, queue=True, key=key)
    )
