"""A session that begins as another was, in the Redis catalog: read in its parent's slot, written in its own."""

import time
from typing import Any

from kvrecall.domain.errors import UnknownSession, UnknownTurn
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import ForkCommit
from services.catalog.redis import mapping as rows
from services.catalog.redis import scripts
from services.catalog.redis.client import CatalogRedis
from services.catalog.redis.commits import RedisCommit, created
from services.catalog.redis.keys import CALLS, META, REPAIRS, SET, TOKENS, TURNS
from services.catalog.redis.sessions import RedisSessions


async def forked(link: CatalogRedis, sessions: RedisSessions, commit: ForkCommit) -> RedisCommit:
    """What makes the child. Raises UnknownSession, UnknownTurn, CatalogError."""
    key, call = sessions.script(scripts.SNAPSHOT, commit.parent, commit.turns)
    snapshot = await link.ask(key, *call)
    if snapshot == b"unknown":
        raise UnknownSession(commit.parent)
    if snapshot == b"turn":
        raise UnknownTurn(commit.parent, commit.turns)
    (_, open_calls, recent, repairs), log, tokens, calls, rest = snapshot
    changes = created(commit.session, commit.worker_state).push(TURNS, log).push(TOKENS, tokens)
    fields = rows.mapping(calls)
    if not rest:
        begun = _begun(fields, commit.turns)
        changes.put(CALLS, rows.copied_calls(fields, commit.turns, begun))
        return changes.put(META, {"calls": len(begun)})
    changes.put(CALLS, rows.copied_calls(fields, commit.turns, None))
    changes.put(META, {"calls": open_calls, "recent": recent, "repairs": repairs})
    return _known_since(changes, rest)


def _begun(fields: dict[str, bytes], turn: int) -> list[PendingCall]:
    """The calls that a turn ended on, as they were made."""
    now = time.time()
    return [
        PendingCall(turn, call.position, call.call, last_event_at=now)
        for call in rows.calls_of_turn(fields, turn)
    ]


def _known_since(changes: RedisCommit, rest: list[Any]) -> RedisCommit:
    """Repairs, and the five hashes of episodes, which have places one after the other."""
    repairs, *hashes = rest
    changes.push(REPAIRS, repairs)
    for place, flat in enumerate(hashes, SET):
        changes.put(place, rows.mapping(flat))
    return changes
