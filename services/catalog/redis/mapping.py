"""The domain's values as fields and entries of the Redis catalog, and back."""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from kvrecall.domain.session import Session, SharedPages, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.base import EpisodeRecord, EpisodeSet, RepairRecord, SegmentRecord
from services.catalog.serialization import MEMORY, SETTINGS, token_bytes, token_values

SHARED = TypeAdapter(tuple[SharedPages, ...])
CALL = TypeAdapter(PendingCall)
RECORD = TypeAdapter(RepairRecord)
TURN = TypeAdapter(Turn)

Parts = Sequence[bytes | None]

SESSION_FIELDS = (
    "epoch",
    "settings",
    "created_at",
    "updated_at",
    "turns",
    "memory",
    "output_due",
    "shared",
    "worker",
)
"""What is read of META; it also has `state`, the worker's, `length`, `tenant` and `digest`, and three counts: `calls`
that are open, `repairs` ever, and `recent` ones since the last turn."""

_COUNTS = ("segments", "built_segments", "next_token", "last_turn", "last_utterance", "dimensions")
_SEGMENT = struct.Struct("<qq")


FORGOTTEN_FIELDS: Mapping[str, int] = {name: getattr(EpisodeSet(), name) for name in _COUNTS}
"""Fields of SET as they are before the first segment. The count of builds stays: no id is ever given twice."""


def session_fields(session: Session, worker_state: bytes) -> dict[str, str | bytes | int | float]:
    """META of a new session; its open calls and repairs are none."""
    return {
        "epoch": session.epoch,
        "settings": SETTINGS.dump_json(session.settings),
        "created_at": repr(session.created_at),
        "updated_at": repr(session.updated_at),
        "turns": session.turns,
        "memory": MEMORY.dump_json(session.memory),
        "output_due": session.output_due,
        "shared": SHARED.dump_json(session.shared),
        "worker": session.worker,
        "state": worker_state,
        "length": session.memory.length,
        "tenant": session.settings.tenant,
        "digest": "",
        "calls": 0,
        "repairs": 0,
        "recent": 0,
    }


def session_value(
    id: str, values: Parts, calls: Sequence[Parts], repairs: Sequence[bytes]
) -> Session:
    """The session of what the script SESSION returns for `SESSION_FIELDS`."""
    epoch, settings, created_at, updated_at, turns, memory, output_due, shared, worker = map(
        told, values
    )
    number = int(turns)
    return Session(
        id=id,
        epoch=int(epoch),
        settings=SETTINGS.validate_json(settings),
        created_at=float(created_at),
        updated_at=float(updated_at),
        turns=number,
        memory=MEMORY.validate_json(memory),
        calls=tuple(call_value(parts) for parts in calls),
        repairs=tuple(RECORD.validate_json(entry).report for entry in repairs),
        output_due=int(output_due),
        shared=SHARED.validate_json(shared),
        worker=worker.decode(),
    )


def turn_entries(turn: Turn) -> tuple[bytes, bytes]:
    """The entries of TURNS and TOKENS."""
    return TURN.dump_json(replace(turn, token_ids=())), token_bytes(turn.token_ids)


def turn_values(session: str, entries: Sequence[bytes], tokens: Sequence[bytes]) -> list[Turn]:
    """Turns of their entries; some may be copies of another session's."""
    return [
        replace(TURN.validate_json(entry), session=session, token_ids=token_values(ids))
        for entry, ids in zip(entries, tokens, strict=True)
    ]


def call_fields(call: PendingCall) -> dict[str, str | bytes | int]:
    """What a client can tell of a call, as fields of CALLS; what repairs have done is left out."""
    at = f"{call.turn}:{call.position}"
    return {at: CALL.dump_json(call), f"{at}:batch": call.batch}


def new_call_fields(calls: Iterable[PendingCall]) -> dict[str, str | bytes | int]:
    """Fields of CALLS for calls that were just made."""
    fields: dict[str, str | bytes | int] = {}
    for call in calls:
        fields |= call_fields(call) | {f"@{call.call.id}": f"{call.turn}:{call.position}"}
    return fields


def restored_call_fields(call: PendingCall) -> dict[str, str | bytes | int]:
    """All fields of CALLS for a call as it was in another catalog."""
    at = f"{call.turn}:{call.position}"
    fields = new_call_fields([call]) | {
        f"{at}:signal": call.call_signal,
        f"{at}:delta": call.delta_repaired,
    }
    return fields | ({f"{call.turn}:repaired:{call.batch}": 1} if call.result_repaired else {})


def call_value(parts: Parts) -> PendingCall:
    """The call of its own field, of the fields signal and delta, and of whether its result was repaired on."""
    call, signal, delta, repaired = parts
    return replace(
        CALL.validate_json(told(call)),
        call_signal=(signal or b"").decode(),
        delta_repaired=int(delta or 0),
        result_repaired=repaired is not None,
    )


def said_value(call: PendingCall, result: bytes | None, turns: int) -> PendingCall:
    """A call after that many turns: the turn that follows its own says its result."""
    if result is not None:
        call = replace(call, status=CallStatus.COMPLETED, result=result.decode())
    return replace(call, consumed_in_turn=call.turn + 1) if call.turn < turns else call


def copied_calls(
    fields: Mapping[str, bytes], turns: int, calls: Sequence[PendingCall] | None
) -> dict[str, str | bytes | int]:
    """CALLS of a fork at the end of turn `turns`: with that turn's own as they are, or as in `calls`."""
    last = turns if calls is None else turns - 1
    kept: dict[str, str | bytes | int] = {}
    for name, value in fields.items():
        turn, colon, _ = name.partition(":")
        if colon and turn.isdigit() and int(turn) <= last:
            kept[name] = value
    made = [
        CALL.validate_json(value)
        for name, value in fields.items()
        if name in kept and _is_call(name)
    ]
    for call in sorted(made, key=lambda call: (call.turn, -call.position)):
        kept[f"@{call.call.id}"] = f"{call.turn}:{call.position}"
    return kept | new_call_fields(calls or ())


def calls_of_turn(fields: Mapping[str, bytes], turn: int) -> list[PendingCall]:
    """The calls that a turn ended on, from CALLS."""
    found = [CALL.validate_json(value) for name, value in fields.items() if _is_call(name)]
    return sorted((call for call in found if call.turn == turn), key=lambda call: call.position)


def _is_call(name: str) -> bool:
    """Whether a field of CALLS is a call itself: `<turn>:<position>`."""
    return re.fullmatch(r"\d+:\d+", name) is not None


def repair_values(entries: Sequence[bytes], last: int) -> list[RepairRecord]:
    """The records of REPAIRS, the newest first, the last of which has number `last`."""
    newest_first = reversed(entries)
    return [
        replace(RECORD.validate_json(entry), number=last - n)
        for n, entry in enumerate(newest_first)
    ]


def segment_entry(segment: SegmentRecord) -> bytes:
    """A field of SEGMENTS; the label is one of LABELS."""
    return _SEGMENT.pack(segment.start, segment.stop) + segment.vector


def segment_values(
    segments: Mapping[str, bytes], labels: Mapping[str, bytes]
) -> list[SegmentRecord]:
    """All segments, in time order."""
    found = [_segment(number, entry, labels[number]) for number, entry in segments.items()]
    return sorted(found, key=lambda segment: segment.number)


def _segment(number: str, entry: bytes, label: bytes) -> SegmentRecord:
    start, stop = _SEGMENT.unpack_from(entry)
    return SegmentRecord(int(number), start, stop, entry[_SEGMENT.size :], int(label))


def set_fields(found: EpisodeSet) -> dict[str, int]:
    """Fields of SET that the care of episodes writes; `active` is written by turns, `ids` by builds."""
    return {name: getattr(found, name) for name in (*_COUNTS, "builds")}


def ids_text(episodes: Iterable[EpisodeRecord]) -> str:
    """The field `ids` of SET: which episodes there are, in their order."""
    return json.dumps([episode.id for episode in episodes])


def episode_fields(episode: EpisodeRecord) -> dict[str, str | bytes]:
    """Fields of EPISODES that new segments change."""
    return {
        f"size:{episode.id}": json.dumps([episode.segments, episode.tokens]),
        f"centroid:{episode.id}": episode.centroid,
    }


def built_fields(episode: EpisodeRecord) -> dict[str, str | bytes | int]:
    """All fields of EPISODES for a newly built one."""
    fields: dict[str, str | bytes | int] = {**episode_fields(episode)}
    return fields | {
        f"medoid:{episode.id}": episode.medoid,
        f"matched:{episode.id}": episode.matched,
    }


def set_value(fields: Mapping[str, bytes], episodes: Mapping[str, bytes]) -> EpisodeSet:
    """The set of SET and EPISODES."""
    active = fields.get("active", b"").decode()
    if "builds" not in fields:
        return EpisodeSet()
    counts = {name: int(fields[name]) for name in (*_COUNTS, "builds")}
    ids: list[str] = json.loads(fields.get("ids", b"[]"))
    return EpisodeSet(**counts, active=active, episodes=tuple(_episode(id, episodes) for id in ids))


def _episode(id: str, fields: Mapping[str, bytes]) -> EpisodeRecord:
    segments, tokens = json.loads(fields[f"size:{id}"])
    medoid = fields[f"medoid:{id}"].decode()
    matched = int(fields[f"matched:{id}"])
    return EpisodeRecord(id, fields[f"centroid:{id}"], segments, tokens, medoid, matched)


def mapping(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A hash as Redis lists it."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def told(value: bytes | None) -> bytes:
    """A value that must be there."""
    assert value is not None, "a script wrote only part of a session"
    return value


@dataclass(frozen=True)
class Share:
    """What SHARERS says of one session: so many pages since a time, in the owner's server's seconds."""

    session: str
    entry: bytes

    @property
    def pages(self) -> int:
        """How many of the owner's pages it uses, from the first on."""
        return int(self.entry.split()[0])

    @property
    def since(self) -> int:
        """When it was counted."""
        return int(self.entry.split()[1])
