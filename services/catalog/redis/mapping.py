"""The domain's values as fields and entries of the Redis catalog, and back."""

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter

from kvrecall.domain.errors import CatalogError
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.tool_calls import CallStatus, PendingCall
from services.catalog.records import (
    CallPosition,
    EpisodeRecord,
    EpisodeSet,
    RepairRecord,
    SegmentRecord,
)
from services.catalog.serialization import (
    MEMORY,
    SETTINGS,
    decode_tokens,
    encode_tokens,
    seal_text,
    unseal_text,
)

CALL = TypeAdapter(PendingCall)
RECORD = TypeAdapter(RepairRecord)
TURN = TypeAdapter(Turn)

Parts = Sequence[bytes | None]
Fields = dict[str, str | bytes | int]

# The fields of META that READ_SESSION is asked for. META also has `state`, the worker's, the
# `page_ids` of it, `length`, `tenant`, and three counts: open `calls`, `repairs` ever, and `recent` ones, which
# ran since the last turn.
SESSION_FIELDS = (
    "epoch",
    "settings",
    "created_at",
    "updated_at",
    "turns",
    "memory",
    "output_due",
    "worker",
)

# What is looked at before a session is decoded: the counts of what lies in other keys of it (open
# calls, repairs since the last turn), and its tenant.
HEAD_FIELDS = ("calls", "recent", "tenant")

_COUNTS = ("segments", "built_segments", "next_token", "last_turn", "last_utterance", "dimensions")
_SEGMENT = struct.Struct("<qq")

# Fields of EPISODE_SET before the first segment. The count of builds is not reset: no id is ever
# used twice.
CLEARED_FIELDS: Mapping[str, int] = {name: getattr(EpisodeSet(), name) for name in _COUNTS}


def to_session_fields(
    session: Session, worker_state: bytes, page_ids: bytes
) -> dict[str, str | bytes | int | float]:
    """Build META of a new session, which has no open calls and no repairs."""
    return {
        "epoch": session.epoch,
        "settings": SETTINGS.dump_json(session.settings),
        "created_at": repr(session.created_at),
        "updated_at": repr(session.updated_at),
        "turns": session.turns,
        "memory": MEMORY.dump_json(session.memory),
        "output_due": session.output_due,
        "worker": session.worker,
        "state": worker_state,
        "page_ids": page_ids,
        "length": session.memory.length,
        "tenant": session.settings.tenant,
        "calls": 0,
        "repairs": 0,
        "recent": 0,
    }


def from_session_parts(
    session_id: str, values: Parts, calls: Sequence[Parts], repairs: Sequence[bytes]
) -> Session:
    """Convert from the reply of READ_SESSION for `SESSION_FIELDS`."""
    fields = dict(zip(SESSION_FIELDS, map(_require, values), strict=True))
    return Session(
        id=session_id,
        epoch=int(fields["epoch"]),
        settings=SETTINGS.validate_json(fields["settings"]),
        created_at=float(fields["created_at"]),
        updated_at=float(fields["updated_at"]),
        turns=int(fields["turns"]),
        memory=MEMORY.validate_json(fields["memory"]),
        calls=tuple(from_call_parts(parts) for parts in calls),
        repairs=tuple(RECORD.validate_json(entry).report for entry in repairs),
        output_due=int(fields["output_due"]),
        worker=fields["worker"].decode(),
    )


def to_turn_entries(turn: Turn) -> tuple[bytes, bytes]:
    """Build the entries of TURNS and TOKENS; the former has a checksum of both."""
    tokens = encode_tokens(turn.token_ids)
    return seal_text(TURN.dump_json(replace(turn, token_ids=())), tokens), tokens


def from_turn_entries(
    session_id: str, entries: Sequence[bytes], tokens: Sequence[bytes]
) -> list[Turn]:
    """Convert from entries of TURNS and TOKENS; some may be copies of another session's.

    Raises CatalogError for damaged ones.
    """
    try:
        return [
            replace(
                TURN.validate_json(unseal_text(entry, ids)),
                session=session_id,
                token_ids=decode_tokens(ids),
            )
            for entry, ids in zip(entries, tokens, strict=True)
        ]
    except ValueError as error:
        raise CatalogError(
            f"the turn log of session {session_id!r} could not be read: {error}"
        ) from error


def to_reported_fields(call: PendingCall) -> Fields:
    """Build the fields of CALLS that a client's report changes, without repair progress."""
    at = f"{call.turn}:{call.position}"
    return {at: CALL.dump_json(call), f"{at}:batch": call.batch}


def to_call_fields(calls: Iterable[PendingCall]) -> Fields:
    """Build the fields of CALLS for new calls."""
    fields: Fields = {}
    for call in calls:
        fields |= to_reported_fields(call) | {f"@{call.call.id}": f"{call.turn}:{call.position}"}
    return fields


def to_piece_fields(call: CallPosition, pieces: Mapping[int, str]) -> Fields:
    """Build the fields of CALLS for pieces of a call's output."""
    return dict(zip(to_piece_names(call, pieces), pieces.values(), strict=True))


def to_piece_names(call: CallPosition, indices: Iterable[int]) -> list[str]:
    """Return the names of the fields of CALLS that have pieces of a call's output."""
    turn, position = call
    return [f"{turn}:{position}:piece:{index}" for index in indices]


def to_restored_call_fields(call: PendingCall) -> Fields:
    """Build all fields of CALLS for a call of another catalog."""
    at = f"{call.turn}:{call.position}"
    fields = to_call_fields([call]) | {
        f"{at}:signal": call.call_signal,
        f"{at}:delta": call.delta_repaired,
    }
    return fields | ({f"{call.turn}:repaired:{call.batch}": 1} if call.result_repaired else {})


def from_call_parts(parts: Parts) -> PendingCall:
    """Convert from the call's own field, signal, delta, and its batch's repaired flag."""
    call, signal, delta, repaired = parts
    return replace(
        CALL.validate_json(_require(call)),
        call_signal=(signal or b"").decode(),
        delta_repaired=int(delta or 0),
        result_repaired=repaired is not None,
    )


def consume_call(call: PendingCall, result: bytes | None, turns: int) -> PendingCall:
    """Return a call as it is after that many turns: the turn after its own consumes its result."""
    if result is not None:
        call = replace(call, status=CallStatus.COMPLETED, result=result.decode())
    return replace(call, consumed_in_turn=call.turn + 1) if call.turn < turns else call


def copy_calls(
    fields: Mapping[str, bytes], turns: int, calls: Sequence[PendingCall] | None
) -> Fields:
    """Build CALLS of a fork at the end of turn `turns`.

    The calls of that turn itself are copied as they are (None), or replaced by `calls`.
    """
    last = turns if calls is None else turns - 1
    copied: Fields = {}
    for name, value in fields.items():
        turn, colon, _ = name.partition(":")
        if colon and turn.isdigit() and int(turn) <= last:
            copied[name] = value
    made = [
        CALL.validate_json(value)
        for name, value in fields.items()
        if name in copied and is_call_field(name)
    ]
    for call in sorted(made, key=lambda call: (call.turn, -call.position)):
        copied[f"@{call.call.id}"] = f"{call.turn}:{call.position}"
    return copied | to_call_fields(calls or ())


def get_calls_of_turn(fields: Mapping[str, bytes], turn: int) -> list[PendingCall]:
    """Return the calls in CALLS that a turn ended on, in call order."""
    calls = [CALL.validate_json(value) for name, value in fields.items() if is_call_field(name)]
    return sorted((call for call in calls if call.turn == turn), key=lambda call: call.position)


def is_call_field(name: str) -> bool:
    """Return whether a field of CALLS is a call itself: `<turn>:<position>`."""
    return re.fullmatch(r"\d+:\d+", name) is not None


def from_repair_entries(entries: Sequence[bytes], last: int) -> list[RepairRecord]:
    """Convert from REPAIRS, newest first; the last entry has number `last`."""
    return [
        replace(RECORD.validate_json(entry), number=last - age)
        for age, entry in enumerate(reversed(entries))
    ]


def to_segment_entry(segment: SegmentRecord) -> bytes:
    """Build a field of SEGMENTS; the label is a field of LABELS."""
    return _SEGMENT.pack(segment.start, segment.stop) + segment.vector


def from_segment_entries(
    segments: Mapping[str, bytes], labels: Mapping[str, bytes]
) -> list[SegmentRecord]:
    """Convert from SEGMENTS and LABELS, in time order."""
    records = [
        _from_segment_entry(number, entry, labels[number]) for number, entry in segments.items()
    ]
    return sorted(records, key=lambda segment: segment.number)


def _from_segment_entry(number: str, entry: bytes, label: bytes) -> SegmentRecord:
    start, stop = _SEGMENT.unpack_from(entry)
    return SegmentRecord(int(number), start, stop, entry[_SEGMENT.size :], int(label))


def to_set_fields(episode_set: EpisodeSet) -> dict[str, int]:
    """Build the fields of EPISODE_SET that maintenance writes.

    Turns write `active`, builds write `ids`.
    """
    return {name: getattr(episode_set, name) for name in (*_COUNTS, "builds")}


def encode_ids(episodes: Iterable[EpisodeRecord]) -> str:
    """Encode the field `ids` of EPISODE_SET: the episodes' ids in their order."""
    return json.dumps([episode.id for episode in episodes])


def to_grown_episode_fields(episode: EpisodeRecord) -> dict[str, str | bytes]:
    """Build the fields of EPISODES that new segments change."""
    return {
        f"size:{episode.id}": json.dumps([episode.segments, episode.tokens]),
        f"centroid:{episode.id}": episode.centroid,
    }


def to_episode_fields(episode: EpisodeRecord) -> Fields:
    """Build all fields of EPISODES for a newly built episode."""
    fields: Fields = {**to_grown_episode_fields(episode)}
    return fields | {
        f"medoid:{episode.id}": episode.medoid,
        f"matched:{episode.id}": episode.matched,
    }


def from_set_fields(fields: Mapping[str, bytes], episodes: Mapping[str, bytes]) -> EpisodeSet:
    """Convert from EPISODE_SET and EPISODES."""
    if "builds" not in fields:
        return EpisodeSet()
    counts = {name: int(fields[name]) for name in (*_COUNTS, "builds")}
    ids: list[str] = json.loads(fields.get("ids", b"[]"))
    return EpisodeSet(
        **counts,
        active=fields.get("active", b"").decode(),
        episodes=tuple(_from_episode_fields(id, episodes) for id in ids),
    )


def _from_episode_fields(id: str, fields: Mapping[str, bytes]) -> EpisodeRecord:
    segments, tokens = json.loads(fields[f"size:{id}"])
    return EpisodeRecord(
        id=id,
        centroid=fields[f"centroid:{id}"],
        segments=segments,
        tokens=tokens,
        medoid=fields[f"medoid:{id}"].decode(),
        matched=int(fields[f"matched:{id}"]),
    )


def to_hash(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Convert from a hash as a script returns it: names and values in turn."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def _require(value: bytes | None) -> bytes:
    assert value is not None, "a script writes all fields of a session"
    return value
