"""What a commit changes in Redis: conditions and ready-made commands on the keys of one session, for one script."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from kvrecall.domain.reports import MemoryReport, RepairReport
from kvrecall.domain.session import Session, SharedPages
from kvrecall.domain.session_settings import RepairTrigger
from kvrecall.domain.tool_calls import PendingCall
from services.catalog.base import (
    REPAIRS_KEPT,
    BuildCommit,
    RepairCommit,
    RepairDetails,
    RepairRecord,
    SegmentsCommit,
    TurnCommit,
)
from services.catalog.redis import mapping as rows
from services.catalog.redis.client import Argument
from services.catalog.redis.keys import (
    ANSWER,
    BUILT,
    CALLS,
    EPISODES,
    LABELS,
    META,
    OWNERS,
    REPAIRS,
    SEGMENTS,
    SET,
    TOKENS,
    TURNS,
)
from services.catalog.serialization import MEMORY

_MOST_WORDS = 2000
"""Of one command: what Lua takes at once is bounded."""


@dataclass
class RedisCommit:
    """Collected one by one. A place is that of a key in `redis_keys`. `at` is when they were made."""

    at: float = field(default_factory=time.time)
    conditions: list[Argument] = field(default_factory=list)
    commands: list[Argument] = field(default_factory=list)

    def expect(self, place: int, name: str, value: str) -> Self:
        """Only if a field has this value (empty: is not there); without a name, only if the key is not there."""
        self.conditions += [place + 1, name, value]
        return self

    def run(self, command: str, place: int, *words: Argument) -> Self:
        """A command whose first word is the key."""
        self.commands += [2 + len(words), command, place + 1, *words]
        return self

    def put(self, place: int, fields: Mapping[str, Argument]) -> Self:
        """Set fields of a hash."""
        return self._in_parts("HSET", place, [word for item in fields.items() for word in item])

    def push(self, place: int, entries: Iterable[Argument]) -> Self:
        """Append to a list."""
        return self._in_parts("RPUSH", place, list(entries))

    def arguments(self) -> list[Argument]:
        """As the script APPLY takes them."""
        return [len(self.conditions) // 3, *self.conditions, *self.commands]

    def _in_parts(self, command: str, place: int, words: list[Argument]) -> Self:
        for first in range(0, len(words), _MOST_WORDS):
            self.run(command, place, *words[first : first + _MOST_WORDS])
        return self


def remembering(changes: RedisCommit, answer: str, milliseconds: int) -> RedisCommit:
    """The same with an answer, which nobody has given yet."""
    return changes.expect(ANSWER, "", "").run("SET", ANSWER, answer, "PX", milliseconds)


def created(session: Session, worker_state: bytes) -> RedisCommit:
    """A new session, which is counted wherever it shares."""
    changes = RedisCommit().put(META, rows.session_fields(session, worker_state))
    return changes.put(OWNERS, _pages(session.shared))


def turn_committed(commit: TurnCommit) -> RedisCommit:
    """Everything that a turn changes of its session."""
    turn = commit.turn
    outcome = commit.turn.outcome
    entry, tokens = rows.turn_entries(turn)
    changes = RedisCommit()
    changes.expect(META, "turns", str(turn.number - 1))
    changes.push(TURNS, [entry]).push(TOKENS, [tokens])
    changes.put(
        META,
        _memory(outcome.memory)
        | {
            "turns": turn.number,
            "updated_at": repr(changes.at),
            "output_due": 0 if commit.calls else outcome.output_tokens,
            "state": commit.worker_state,
            "calls": len(commit.calls),
            "recent": 0,
        },
    )
    changes.put(SET, {"active": commit.active})
    if commit.matched:
        changes.run("HINCRBY", EPISODES, f"matched:{commit.matched}", 1)
    changes.put(
        CALLS,
        {
            f"{turn.number - 1}:said:{call}": result
            for call, result in commit.inline_results.items()
        },
    )
    made = [
        PendingCall(turn.number, place, call, last_event_at=changes.at)
        for place, call in enumerate(commit.calls)
    ]
    changes.put(CALLS, rows.new_call_fields(made))
    if outcome.own_repair is not None:
        _add_repair(changes, turn.number, outcome.own_repair, commit.repaired)
    if commit.shared is not None:
        changes.put(META, {"shared": rows.SHARED.dump_json(commit.shared)}).put(
            OWNERS, _pages(commit.shared)
        )
    if commit.prefix is not None:
        changes.put(META, {"digest": commit.digest})
    return changes


def repair_committed(commit: RepairCommit, turns: int, calls: int) -> RedisCommit:
    """What a repair after that many turns changed, while so many calls are open."""
    changes = RedisCommit().expect(META, "turns", str(turns))
    repair = commit.repair
    if repair.trigger is RepairTrigger.LAST_OUTPUT:
        changes.put(META, {"output_due": 0})
    elif calls:
        at = f"{turns}:{repair.position}"
        done: dict[str, tuple[str, Argument]] = {
            RepairTrigger.TOOL_CALL: (f"{at}:signal", repair.text),
            RepairTrigger.TOOL_DELTA: (f"{at}:delta", repair.reach),
            RepairTrigger.TOOL_RESULT: (f"{turns}:repaired:{repair.batch}", 1),
        }
        changes.run("HSET", CALLS, *done[repair.trigger])
    if commit.worker_state is not None:
        changes.put(META, {"state": commit.worker_state})
    if commit.memory is not None:
        changes.put(META, _memory(commit.memory))
    if commit.report is not None:
        _add_repair(changes, turns + 1, commit.report, commit.details)
        changes.run("HINCRBY", META, "recent", 1)
    return changes


def call_reported(call: PendingCall) -> RedisCommit:
    """The client told something new of a call."""
    return RedisCommit().put(CALLS, rows.call_fields(replace(call, last_event_at=time.time())))


def segments_added(commit: SegmentsCommit) -> RedisCommit:
    """New segments; the episodes they were assigned to have grown."""
    changes = RedisCommit()
    for segment in commit.segments:
        changes.expect(SEGMENTS, str(segment.number), "")
    changes.put(SEGMENTS, {str(each.number): rows.segment_entry(each) for each in commit.segments})
    changes.put(LABELS, {str(each.number): each.label for each in commit.segments})
    for episode in commit.found.episodes:
        changes.put(EPISODES, rows.episode_fields(episode))
    return changes.put(SET, rows.set_fields(commit.found))


def episodes_built(commit: BuildCommit) -> RedisCommit:
    """New episodes in the place of those before."""
    changes = RedisCommit().run("DEL", EPISODES).run("DEL", BUILT)
    for episode, built in zip(commit.found.episodes, commit.built, strict=True):
        changes.put(EPISODES, rows.built_fields(episode)).put(BUILT, {episode.id: built})
    changes.put(LABELS, {str(number): label for number, label in enumerate(commit.labels)})
    changes.put(SET, {"ids": rows.ids_text(commit.found.episodes)})
    return changes.put(SET, rows.set_fields(commit.found))


def episodes_forgotten() -> RedisCommit:
    """No episode and no segment; which was active and how many builds there were is left."""
    changes = RedisCommit()
    for place in (EPISODES, BUILT, SEGMENTS, LABELS):
        changes.run("DEL", place)
    changes.run("HSETNX", SET, "builds", 0).run("HDEL", SET, "ids")
    return changes.put(SET, rows.FORGOTTEN_FIELDS)


def _add_repair(
    changes: RedisCommit, turn: int, report: RepairReport, details: RepairDetails
) -> None:
    record = RepairRecord(0, turn, time.time(), report, details)
    changes.push(REPAIRS, [rows.RECORD.dump_json(record)]).run("LTRIM", REPAIRS, -REPAIRS_KEPT, -1)
    changes.run("HINCRBY", META, "repairs", 1)


def _memory(memory: MemoryReport) -> dict[str, Argument]:
    return {"memory": MEMORY.dump_json(memory), "length": memory.length}


def _pages(shared: Iterable[SharedPages]) -> dict[str, int]:
    return {each.owner: each.pages for each in shared}
