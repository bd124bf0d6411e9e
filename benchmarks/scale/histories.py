"""Sessions of many turns, found by the whole histories that clients repeat."""

import random
from dataclasses import replace
from hashlib import blake2b

from kvrecall.domain.messages import Message, Sampling
from kvrecall.domain.reports import MemoryReport, TurnOutcome
from kvrecall.domain.sessions.request import CreateSession
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.turn_request import TurnRequest
from services.catalog.base import Catalog
from services.catalog.records import TurnCommit
from services.conversations.continuation import Conversation
from services.conversations.matching import Conversations

MESSAGES = 500
_WORDS = 32
_NEXT = Message("user", "and then?")


def build_digest(number: int) -> str:
    """Return the digest of some conversation that no request asks for."""
    return blake2b(b"%d" % number, digest_size=32).hexdigest()


def build_unknown(rng: random.Random, known: Conversation) -> Conversation:
    """Return a history that no session holds: the first message is another one."""
    first = Message("user", f"something else, {rng.getrandbits(64)}")
    return replace(known, messages=(first, *known.messages[1:]))


async def add_long_session(
    catalog: Catalog, conversations: Conversations, session: Session, rng: random.Random
) -> Conversation:
    """Add a session of `MESSAGES` messages by the catalog's own writes; return its history."""
    said = [
        Message(role, " ".join(f"word{rng.randrange(1000)}" for _ in range(_WORDS)))
        for _ in range(MESSAGES // 2)
        for role in ("user", "assistant")
    ]
    conversation = Conversation(
        (*said, _NEXT), CreateSession(), TurnRequest((), sampling=Sampling(8))
    )
    history = (await conversations.look_up(conversation)).history
    await catalog.sessions.create(session, b"", None)
    for number in range(1, MESSAGES // 2 + 1):
        memory = MemoryReport(length=34 * number)
        asked, answer = said[2 * number - 2 : 2 * number]
        outcome = TurnOutcome(session.id, number, answer, "stop", 33, 1, memory, (), {})
        turn = Turn(session.id, number, (asked,), tuple(range(34)), outcome, (33, 1))
        commit = TurnCommit(turn, b"", history=history.digests[2 * number].hex())
        await catalog.turns.commit(commit, 1, None)
    return conversation
