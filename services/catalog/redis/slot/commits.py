"""Commits to one session: conditions and ready-made commands on its keys, for one script."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.sessions.session import Session
from kvrecall.domain.settings.session import RepairTrigger
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.encryption.cipher import Cipher
from services.catalog.records import (
    REPAIRS_RETAINED,
    BuildCommit,
    RepairCommit,
    RepairDetails,
    RepairRecord,
    SegmentsCommit,
    SettleCommit,
    TurnCommit,
)
from services.catalog.redis import mapping
from services.catalog.redis.connection.keys import (
    BUILT,
    CALLS,
    EPISODE_SET,
    EPISODES,
    LABELS,
    META,
    RECORD,
    REPAIRS,
    SEGMENTS,
    STATES,
    TOKENS,
    TURNS,
)
from services.catalog.redis.connection.shared import Argument
from services.catalog.serialization import MEMORY

# The most words of one command: Lua's `unpack` is limited.
_MAX_WORDS = 2000


@dataclass
class RedisCommit:
    """A commit that is built step by step. Indices are those of keys.py; `at` is its Unix time.

    With `allow_oom` it is applied even if Redis is out of memory.
    """

    at: float = field(default_factory=time.time)
    allow_oom: bool = False
    conditions: list[list[Argument]] = field(default_factory=list)
    commands: list[Argument] = field(default_factory=list)

    def expect(self, reply: str | int, command: str, index: int, *words: Argument) -> Self:
        """Require a reading command, whose first word is a key, to have this reply (empty: nil)."""
        self.conditions.append([reply, *_to_words(command, index, words)])
        return self

    def expect_turns(self, turns: int) -> Self:
        """Require the session to have so many turns, and all of them in its log.

        A log that Redis had evicted would be continued from its middle.
        """
        self.expect(turns, "HGET", META, "turns")
        return self.expect(turns, "LLEN", TURNS).expect(turns, "LLEN", TOKENS)

    def run(self, command: str, index: int, *words: Argument) -> Self:
        """Add a command whose first word is a key."""
        self.commands += _to_words(command, index, words)
        return self

    def put(self, index: int, fields: Mapping[str, Argument]) -> Self:
        """Set fields of a hash."""
        return self._run_in_parts("HSET", index, [word for item in fields.items() for word in item])

    def push(self, index: int, entries: Iterable[Argument]) -> Self:
        """Append to a list."""
        return self._run_in_parts("RPUSH", index, list(entries))

    def store_record(self, text: str, milliseconds: int) -> Self:
        """Store an idempotency record that does not exist yet."""
        return self.expect(0, "EXISTS", RECORD).run("SET", RECORD, text, "PX", milliseconds)

    def count_bytes(self) -> int:
        """Return the most bytes that the session may grow by."""
        texts = (word for word in self.commands if isinstance(word, str | bytes))
        return sum(len(word.encode() if isinstance(word, str) else word) for word in texts)

    def to_arguments(self) -> list[Argument]:
        """Return conditions and commands as APPLY_COMMIT takes them."""
        conditions = [word for condition in self.conditions for word in condition]
        return [len(self.conditions), *conditions, *self.commands]

    def _run_in_parts(self, command: str, index: int, words: list[Argument]) -> Self:
        for first in range(0, len(words), _MAX_WORDS):
            self.run(command, index, *words[first : first + _MAX_WORDS])
        return self


def build_create(
    session: Session, worker_state: bytes, cipher: Cipher, page_ids: bytes = b""
) -> RedisCommit:
    """Build the commit of a new session."""
    fields = mapping.to_session_fields(session, worker_state, page_ids, cipher)
    return RedisCommit().put(META, fields)


def build_turn(turn_commit: TurnCommit, at: float, cipher: Cipher) -> RedisCommit:
    """Build the commit, at time `at`, of all that a turn changes of its session."""
    turn = turn_commit.turn
    commit = RedisCommit(at).expect_turns(turn.number - 1)
    entry, tokens = mapping.to_turn_entries(turn, cipher)
    commit.push(TURNS, [entry]).push(TOKENS, [tokens])
    commit.put(META, _to_turn_fields(turn_commit, commit.at, cipher))
    commit.put(EPISODE_SET, {"active": turn_commit.active})
    if turn_commit.kept is not None:
        packed = turn_commit.kept.packed
        kept = mapping.seal_kept(turn.session, turn.number, packed, cipher)
        commit.put(STATES, {str(turn.number): kept})
        if (dropped := turn_commit.kept.get_dropped(turn.number)) is not None:
            commit.run("HDEL", STATES, str(dropped))
    if turn_commit.matched:
        commit.run("HINCRBY", EPISODES, f"matched:{turn_commit.matched}", 1)
    _put_calls(commit, turn_commit, cipher)
    if turn.outcome.own_repair is not None:
        _add_repair(commit, turn.number, turn.outcome.own_repair, turn_commit.repaired, cipher)
    return commit


def build_repair(
    session_id: str, repair_commit: RepairCommit, turns: int, open_calls: int, cipher: Cipher
) -> RedisCommit:
    """Build the commit of a repair after that many turns, with so many calls open."""
    commit = RedisCommit().expect_turns(turns)
    _mark_done(commit, repair_commit, turns, open_calls, cipher)
    if repair_commit.worker_state is not None:
        state = mapping.seal_state(session_id, repair_commit.worker_state, cipher)
        commit.put(META, {"state": state})
    if repair_commit.memory is not None:
        commit.put(META, _to_memory_fields(repair_commit.memory))
    if repair_commit.report is not None:
        _add_repair(commit, turns + 1, repair_commit.report, repair_commit.details, cipher)
        commit.run("HINCRBY", META, "recent", 1)
    return commit


def build_settled(session_id: str, settle_commit: SettleCommit, cipher: Cipher) -> RedisCommit:
    """Build the commit of rows that were settled between turns."""
    state = mapping.seal_state(session_id, settle_commit.worker_state, cipher)
    states = {"state": state, "page_ids": settle_commit.page_ids}
    return RedisCommit().put(META, states).put(META, _to_memory_fields(settle_commit.memory))


def build_call_report(
    call: PendingCall, at: float, cipher: Cipher, piece: tuple[int, str] | None = None
) -> RedisCommit:
    """Build the commit, at time `at`, of a client's report on a call."""
    commit = RedisCommit(at)
    commit.put(CALLS, mapping.to_reported_fields(call.stamped(at), cipher))
    if piece is not None:
        position = (call.turn, call.position)
        commit.put(CALLS, mapping.to_piece_fields(position, dict([piece]), cipher))
    return commit


def build_segments(segments_commit: SegmentsCommit, cipher: Cipher) -> RedisCommit:
    """Build the commit of new segments; centroid and size of their episodes change too."""
    commit = RedisCommit()
    segments = segments_commit.segments
    for segment in segments:
        commit.expect("", "HGET", SEGMENTS, str(segment.number))
    entries = {str(each.number): mapping.to_segment_entry(each, cipher) for each in segments}
    commit.put(SEGMENTS, entries)
    commit.put(LABELS, {str(each.number): each.label for each in segments})
    for episode in segments_commit.episode_set.episodes:
        commit.put(EPISODES, mapping.to_grown_episode_fields(episode, cipher))
    return commit.put(EPISODE_SET, mapping.to_set_fields(segments_commit.episode_set))


def build_episodes(build_commit: BuildCommit, cipher: Cipher) -> RedisCommit:
    """Build the commit that replaces all episodes."""
    commit = RedisCommit().run("DEL", EPISODES).run("DEL", BUILT)
    episodes = build_commit.episode_set.episodes
    for episode, built in zip(episodes, build_commit.built, strict=True):
        commit.put(EPISODES, mapping.to_episode_fields(episode, cipher))
        commit.put(BUILT, mapping.to_built_fields(episode, built, cipher))
    labels = {str(number): label for number, label in enumerate(build_commit.labels)}
    commit.put(LABELS, labels).put(EPISODE_SET, {"ids": mapping.encode_ids(episodes)})
    return commit.put(EPISODE_SET, mapping.to_set_fields(build_commit.episode_set))


def build_clear_episodes() -> RedisCommit:
    """Build the commit that deletes episodes and segments.

    The active episode and the count of builds stay.
    """
    commit = RedisCommit()
    for index in (EPISODES, BUILT, SEGMENTS, LABELS):
        commit.run("DEL", index)
    commit.run("HSETNX", EPISODE_SET, "builds", 0).run("HDEL", EPISODE_SET, "ids")
    return commit.put(EPISODE_SET, mapping.CLEARED_FIELDS)


def build_take_over(worker: str) -> RedisCommit:
    """Build the commit that starts a new epoch."""
    return (
        RedisCommit(allow_oom=True).run("HINCRBY", META, "epoch", 1).put(META, {"worker": worker})
    )


def _to_turn_fields(turn_commit: TurnCommit, at: float, cipher: Cipher) -> dict[str, Argument]:
    outcome = turn_commit.turn.outcome
    state = mapping.seal_state(turn_commit.turn.session, turn_commit.worker_state, cipher)
    return _to_memory_fields(outcome.memory) | {
        "turns": turn_commit.turn.number,
        "updated_at": repr(at),
        "output_due": 0 if turn_commit.calls else outcome.output_tokens,
        "state": state,
        "page_ids": turn_commit.page_ids,
        "calls": len(turn_commit.calls),
        "recent": 0,
    }


def _put_calls(commit: RedisCommit, turn_commit: TurnCommit, cipher: Cipher) -> None:
    """Put the results that a turn brought for the pause before, and the calls it ended on."""
    number = turn_commit.turn.number
    for call_id, result in turn_commit.inline_results.items():
        name = mapping.to_inline_name(number - 1, call_id)
        commit.put(CALLS, {name: mapping.seal_of_calls(name, result, cipher)})
    made = [
        PendingCall(number, position, call, last_event_at=commit.at)
        for position, call in enumerate(turn_commit.calls)
    ]
    commit.put(CALLS, mapping.to_call_fields(made, cipher))


def _mark_done(
    commit: RedisCommit, repair_commit: RepairCommit, turns: int, open_calls: int, cipher: Cipher
) -> None:
    repair = repair_commit.repair
    if repair.trigger is RepairTrigger.LAST_OUTPUT:
        commit.put(META, {"output_due": 0})
    elif open_calls:
        at = f"{turns}:{repair.position}"
        signal = mapping.seal_of_calls(f"{at}:signal", repair.text, cipher)
        done: dict[str, tuple[str, Argument]] = {
            RepairTrigger.TOOL_CALL: (f"{at}:signal", signal),
            RepairTrigger.TOOL_DELTA: (f"{at}:delta", repair.reach),
            RepairTrigger.TOOL_RESULT: (f"{turns}:repaired:{repair.batch}", 1),
        }
        commit.run("HSET", CALLS, *done[repair.trigger])


def _add_repair(
    commit: RedisCommit, turn: int, report: RepairReport, details: RepairDetails, cipher: Cipher
) -> None:
    record = RepairRecord(0, turn, time.time(), report, details)
    commit.push(REPAIRS, [mapping.to_repair_entry(record, cipher)])
    commit.run("LTRIM", REPAIRS, -REPAIRS_RETAINED, -1)
    commit.run("HINCRBY", META, "repairs", 1)


def _to_words(command: str, index: int, words: Sequence[Argument]) -> list[Argument]:
    """Encode a command as APPLY_COMMIT takes it."""
    return [2 + len(words), command, index + 1, *words]


def _to_memory_fields(memory: MemoryReport) -> dict[str, Argument]:
    return {"memory": MEMORY.dump_json(memory), "length": memory.length}
