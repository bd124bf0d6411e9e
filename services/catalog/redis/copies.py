"""A session that comes from another catalog, in the Redis catalog."""

from dataclasses import replace

from services.catalog.base import BuildCommit, EpisodeSet, SegmentsCommit, SessionDump
from services.catalog.redis import mapping as rows
from services.catalog.redis.commits import RedisCommit, created, episodes_built, segments_added
from services.catalog.redis.keys import CALLS, META, REPAIRS, SET, TOKENS, TURNS


def restored(dump: SessionDump) -> RedisCommit:
    """What makes the session as it was."""
    session = dump.session
    changes = created(session, dump.worker_state)
    entries = [rows.turn_entries(turn) for turn in dump.turns]
    changes.push(TURNS, [entry for entry, _ in entries]).push(
        TOKENS, [tokens for _, tokens in entries]
    )
    for call in sorted(dump.calls, key=lambda call: (call.turn, -call.position)):
        changes.put(CALLS, rows.restored_call_fields(call))
    changes.push(REPAIRS, [rows.RECORD.dump_json(record) for record in dump.repairs])
    changes.put(
        META,
        {
            "calls": sum(call.turn == session.turns for call in dump.calls),
            "recent": sum(record.turn > session.turns for record in dump.repairs),
            "repairs": max((record.number for record in dump.repairs), default=0),
        },
    )
    _add_episodes(changes, dump)
    return changes


def _add_episodes(changes: RedisCommit, dump: SessionDump) -> None:
    found = dump.episodes
    if found == EpisodeSet():
        return
    added = segments_added(SegmentsCommit(dump.segments, replace(found, episodes=())))
    labels = tuple(segment.label for segment in dump.segments)
    built = episodes_built(BuildCommit(found, dump.built, labels))
    changes.commands += added.commands + built.commands
    changes.put(SET, {"active": found.active})
