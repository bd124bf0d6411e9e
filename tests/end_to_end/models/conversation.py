"""A conversation whose turns follow from their numbers, in a session of a server."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kvrecall.client import KvrecallClient, Turn
from tests.end_to_end.servers import Json

RECALLING = "recalling"
METHODS: dict[str, Json] = {
    RECALLING: {},
    "bounded": {"research": {"method": "snapkv", "repair_rows": 32}, "budget": 128},
}
"""Settings of sessions: the service's own, and a method that evicts for good."""
GREEDY: Json = {"max_tokens": 16, "stop": ["<tool_call>"]}
_ROWS = ("length", "active_rows", "evicted_rows", "promoted_rows")


@dataclass
class Conversation:
    """A session and the answers that were heard in it."""

    server: Any
    say: Any
    session: str
    answers: tuple[Json, ...] = ()

    @classmethod
    def begin(cls, server: Any, say: Any, settings: Json) -> "Conversation":
        """Create a session under a salt of its own."""
        session = server.own.create_session(seed=7, cache_salt=uuid4().hex, **settings)
        return cls(server, say, session.id)

    @property
    def client(self) -> KvrecallClient:
        """A client of the server as it runs now."""
        own: KvrecallClient = self.server.own
        return own

    def until(self, turns: int) -> "Conversation":
        """Take turns until there are so many."""
        while len(self.answers) < turns:
            self.answers += (self.take(len(self.answers)),)
        return self

    def take(self, number: int) -> Json:
        """Take a turn: some 300 tokens and an answer."""
        messages = [self.say.user(self.say.chatter(number, 18))]
        return substance(self.client.turn(self.session, messages, **GREEDY))

    def fork(self, turn: int | None = None) -> "Conversation":
        """Fork the session at a turn, by default the last one."""
        child = self.client.fork(self.session, turn)
        return Conversation(self.server, self.say, child.id, self.answers[: child.turns])


def substance(turn: Turn) -> Json:
    """What a turn says and what it leaves, without ids and times."""
    return {
        "message": turn.message,
        "usage": turn.usage,
        "rows": {name: getattr(turn.memory, name) for name in _ROWS},
    }


Begin = Callable[..., Conversation]
Undisturbed = Callable[..., tuple[Json, ...]]
