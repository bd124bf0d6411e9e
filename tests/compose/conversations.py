"""Conversations whose replies are known beforehand: a twin with the same seed and words has had them."""

from dataclasses import dataclass
from typing import Any

from kvrecall.client import KvrecallClient, TextDelta, Turn, TurnCompleted, TurnStream
from tests.end_to_end.conftest import chatter, user

Json = dict[str, Any]
SETTINGS: Json = {"budget": 128, "seed": 23}
# Long enough to break something while it is answered: seconds, without the token that ends an answer.
LONG: Json = {"max_tokens": 600, "logit_bias": {"1": -100.0}}
SHORT: Json = {"max_tokens": 12, "stop": ["<tool_call>"]}


@dataclass(frozen=True)
class Conversation:
    """A session of one turn, of which rows are evicted."""

    client: KvrecallClient
    session: str

    def go_on(self) -> Turn:
        """A turn with a long answer."""
        return self.client.turn(self.session, [user("Go on.")], **LONG)

    def stream(self) -> TurnStream:
        """The same turn, as a stream."""
        return self.client.stream(self.session, [user("Go on.")], **LONG)

    def ask(self) -> Turn:
        """A turn with a short answer."""
        question = user("What is the code of Ada's locker?")
        return self.client.turn(self.session, [question], **SHORT)


def begin(client: KvrecallClient, seed: int) -> Conversation:
    """Begin one, the words of which follow from the seed."""
    session = client.create_session(**SETTINGS).id
    turn = client.turn(session, [user(chatter(seed, 30))], **SHORT)
    assert turn.durable, turn
    return Conversation(client, session)


def hear(stream: TurnStream) -> tuple[str, Turn]:
    """Read a stream to its end; returns its text and its turn."""
    *events, last = stream
    assert isinstance(last, TurnCompleted), last
    return "".join(event.text for event in events if isinstance(event, TextDelta)), last.turn
