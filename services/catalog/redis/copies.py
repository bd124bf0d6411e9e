"""Sessions that start as copies in the Redis catalog: forks, and sessions from elsewhere.

A fork is read in its parent's slot and written in its own.
"""

from dataclasses import replace
from typing import Any

from kvrecall.domain.errors import UnknownSession, UnknownTurn
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.records import (
    BuildCommit,
    EpisodeSet,
    ForkCommit,
    SegmentsCommit,
    SessionDump,
)
from services.catalog.redis import mapping, scripts
from services.catalog.redis.commits import (
    RedisCommit,
    build_create,
    build_episodes,
    build_segments,
)
from services.catalog.redis.keys import CALLS, EPISODE_SET, META, REPAIRS, TOKENS, TURNS
from services.catalog.redis.slot import SessionSlots, build_incomplete


async def build_fork(slots: SessionSlots, fork: ForkCommit, at: float) -> RedisCommit:
    """Build the commit of the child. Raises UnknownSession, UnknownTurn, CatalogError.

    Calls that it waits for again were made at time `at`.
    """
    snapshot = await slots.run(scripts.READ_SNAPSHOT, fork.parent, fork.turns)
    if snapshot == b"unknown":
        raise UnknownSession(fork.parent)
    if snapshot == b"turn":
        raise UnknownTurn(fork.parent, fork.turns)
    if snapshot == b"incomplete":
        raise build_incomplete(fork.parent)
    (_, open_calls, recent, repairs), log, tokens, calls, latest = snapshot
    commit = build_create(fork.session, fork.worker_state).push(TURNS, log).push(TOKENS, tokens)
    fields = mapping.to_hash(calls)
    if not latest:
        pause = _build_pause(fields, fork.turns, at)
        commit.put(CALLS, mapping.copy_calls(fields, fork.turns, pause))
        return commit.put(META, {"calls": len(pause)})
    commit.put(CALLS, mapping.copy_calls(fields, fork.turns, None))
    commit.put(META, {"calls": open_calls, "recent": recent, "repairs": repairs})
    return _put_latest(commit, latest)


def build_restore(dump: SessionDump) -> RedisCommit:
    """Build the commit of a session from another catalog."""
    session = dump.session
    commit = build_create(session, dump.worker_state)
    entries = [mapping.to_turn_entries(turn) for turn in dump.turns]
    commit.push(TURNS, [entry for entry, _ in entries])
    commit.push(TOKENS, [tokens for _, tokens in entries])
    for call in sorted(dump.calls, key=lambda call: (call.turn, -call.position)):
        commit.put(CALLS, mapping.to_restored_call_fields(call))
    for position, pieces in dump.pieces.items():
        commit.put(CALLS, mapping.to_piece_fields(position, pieces))
    commit.push(REPAIRS, [mapping.RECORD.dump_json(record) for record in dump.repairs])
    counts = {
        "calls": sum(call.turn == session.turns for call in dump.calls),
        "recent": sum(record.turn > session.turns for record in dump.repairs),
        "repairs": max((record.number for record in dump.repairs), default=0),
    }
    commit.put(META, counts)
    if dump.episodes != EpisodeSet():
        _add_episodes(commit, dump)
    return commit


def _build_pause(fields: dict[str, bytes], turn: int, at: float) -> list[PendingCall]:
    """Build the calls that a turn ended on, as they were made."""
    return [
        PendingCall(turn, call.position, call.call, last_event_at=at)
        for call in mapping.get_calls_of_turn(fields, turn)
    ]


def _put_latest(commit: RedisCommit, latest: list[Any]) -> RedisCommit:
    """Put repairs, and the five hashes of episodes, whose keys follow one another."""
    repairs, *hashes = latest
    commit.push(REPAIRS, repairs)
    for index, flat in enumerate(hashes, EPISODE_SET):
        commit.put(index, mapping.to_hash(flat))
    return commit


def _add_episodes(commit: RedisCommit, dump: SessionDump) -> None:
    without_episodes = replace(dump.episodes, episodes=())
    added = build_segments(SegmentsCommit(dump.segments, without_episodes))
    labels = tuple(segment.label for segment in dump.segments)
    built = build_episodes(BuildCommit(dump.episodes, dump.built, labels))
    commit.commands += added.commands + built.commands
    commit.put(EPISODE_SET, {"active": dump.episodes.active})
