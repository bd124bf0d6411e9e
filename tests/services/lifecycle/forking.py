"""Sessions that tests fork."""

from typing import Any

from kvrecall.domain.messages import Message
from services.catalog.records import IdempotencyKey
from services.lifecycle.forks import ForkRequest

HELLO = Message("user", "hello there")
LONG = Message("user", "one two three four five six seven eight nine")
KEY = IdempotencyKey("fork", "key", "body")


async def spoken(harness, turns: int = 2) -> str:
    """A session in which so many turns of ten words and an answer of one were said."""
    session = await harness.session()
    for _ in range(turns):
        await harness.say(session, LONG)
    return session


async def fork(harness, session: str, turn: int | None = None, **asked: Any) -> str:
    return (await harness.service.fork(session, ForkRequest(turn, **asked))).id
