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
from services.catalog.encryption.cipher import Cipher
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
    session: Session, worker_state: bytes, page_ids: bytes, cipher: Cipher
) -> dict[str, str | bytes | int | float]:
    """Build META of a new session, which has no open calls and no repairs."""
    settings = SETTINGS.dump_json(session.settings)
    return {
        "epoch": session.epoch,
        "settings": cipher.seal(settings, f"settings {session.id}"),
        "created_at": repr(session.created_at),
        "updated_at": repr(session.updated_at),
        "turns": session.turns,
        "memory": MEMORY.dump_json(session.memory),
        "output_due": session.output_due,
        "worker": session.worker,
        "state": seal_state(session.id, worker_state, cipher),
        "page_ids": page_ids,
        "length": session.memory.length,
        "tenant": session.settings.tenant,
        "calls": 0,
        "repairs": 0,
        "recent": 0,
    }


def seal_state(session_id: str, state: bytes, cipher: Cipher) -> bytes:
    """Build the field `state` of META."""
    return cipher.seal(state, f"state {session_id}")


def open_state(session_id: str, sealed: bytes, cipher: Cipher) -> bytes:
    """Read the field `state` of META."""
    return cipher.open(sealed, f"state {session_id}")


def seal_kept(session_id: str, turn: int, packed: bytes, cipher: Cipher) -> bytes:
    """Build a field of STATES."""
    return cipher.seal(packed, f"kept {session_id} {turn}")


def open_kept(session_id: str, turn: int, sealed: bytes, cipher: Cipher) -> bytes:
    """Read a field of STATES."""
    return cipher.open(sealed, f"kept {session_id} {turn}")


def from_session_parts(
    session_id: str,
    values: Parts,
    calls: Sequence[Parts],
    repairs: Sequence[bytes],
    cipher: Cipher,
) -> Session:
    """Convert from the reply of READ_SESSION for `SESSION_FIELDS`."""
    fields = dict(zip(SESSION_FIELDS, map(_require, values), strict=True))
    settings = cipher.open(fields["settings"], f"settings {session_id}")
    made = tuple(_open_repair(entry, cipher) for entry in repairs)
    turn = int(fields["turns"])
    return Session(
        id=session_id,
        epoch=int(fields["epoch"]),
        settings=SETTINGS.validate_json(settings),
        created_at=float(fields["created_at"]),
        updated_at=float(fields["updated_at"]),
        turns=turn,
        memory=MEMORY.validate_json(fields["memory"]),
        calls=tuple(
            from_call_parts(parts, (turn, position), cipher) for position, parts in enumerate(calls)
        ),
        repairs=tuple(record.report for record in made),
        output_due=int(fields["output_due"]),
        worker=fields["worker"].decode(),
    )


def to_turn_entries(turn: Turn, cipher: Cipher) -> tuple[bytes, bytes]:
    """Build the entries of TURNS and TOKENS; the former has a checksum of both.

    Forks copy entries, so their places do not name the session.
    """
    tokens = encode_tokens(turn.token_ids)
    entry = seal_text(TURN.dump_json(replace(turn, token_ids=())), tokens)
    return cipher.seal(entry, f"turn {turn.number}"), cipher.seal(tokens, f"tokens {turn.number}")


def open_tokens(tokens: Sequence[bytes], cipher: Cipher, first: int = 1) -> list[bytes]:
    """Decrypt entries of TOKENS, from that of turn `first` on."""
    return [cipher.open(each, f"tokens {number}") for number, each in enumerate(tokens, first)]


def from_turn_entries(
    session_id: str, entries: Sequence[bytes], tokens: Sequence[bytes], first: int, cipher: Cipher
) -> list[Turn]:
    """Convert from entries of TURNS and TOKENS, from that of turn `first` on.

    Some may be copies of another session's.

    Raises CatalogError for damaged ones.
    """
    ids = open_tokens(tokens, cipher, first)
    logged = [cipher.open(each, f"turn {number}") for number, each in enumerate(entries, first)]
    try:
        return [
            replace(
                TURN.validate_json(unseal_text(entry, own)),
                session=session_id,
                token_ids=decode_tokens(own),
            )
            for entry, own in zip(logged, ids, strict=True)
        ]
    except ValueError as error:
        raise CatalogError(
            f"the turn log of session {session_id!r} could not be read: {error}"
        ) from error


def seal_of_calls(name: str, text: str, cipher: Cipher) -> str | bytes:
    """Encrypt a text that is the field `name` of CALLS, which is its place."""
    return cipher.seal_text(text, f"calls {name}")


def open_of_calls(name: str, stored: bytes, cipher: Cipher) -> str:
    """Read a text that is the field `name` of CALLS."""
    return cipher.open_text(stored, f"calls {name}")


def to_reported_fields(call: PendingCall, cipher: Cipher) -> Fields:
    """Build the fields of CALLS that a client's report changes, without repair progress."""
    at = f"{call.turn}:{call.position}"
    text = CALL.dump_json(call).decode()
    return {at: seal_of_calls(at, text, cipher), f"{at}:batch": call.batch}


def to_call_fields(calls: Iterable[PendingCall], cipher: Cipher) -> Fields:
    """Build the fields of CALLS for new calls."""
    fields: Fields = {}
    for call in calls:
        fields |= to_reported_fields(call, cipher) | {
            f"@{call.call.id}": f"{call.turn}:{call.position}"
        }
    return fields


def to_piece_fields(call: CallPosition, pieces: Mapping[int, str], cipher: Cipher) -> Fields:
    """Build the fields of CALLS for pieces of a call's output."""
    names = to_piece_names(call, pieces)
    return {
        name: seal_of_calls(name, text, cipher)
        for name, text in zip(names, pieces.values(), strict=True)
    }


def to_piece_names(call: CallPosition, indices: Iterable[int]) -> list[str]:
    """Return the names of the fields of CALLS that have pieces of a call's output."""
    turn, position = call
    return [f"{turn}:{position}:piece:{index}" for index in indices]


def to_restored_call_fields(call: PendingCall, cipher: Cipher) -> Fields:
    """Build all fields of CALLS for a call of another catalog."""
    at = f"{call.turn}:{call.position}"
    fields = to_call_fields([call], cipher) | {
        f"{at}:signal": seal_of_calls(f"{at}:signal", call.call_signal, cipher),
        f"{at}:delta": call.delta_repaired,
    }
    return fields | ({f"{call.turn}:repaired:{call.batch}": 1} if call.result_repaired else {})


def from_call_parts(parts: Parts, position: CallPosition, cipher: Cipher) -> PendingCall:
    """Convert from the call's own field, signal, delta, and its batch's repaired flag."""
    call, signal, delta, repaired = parts
    at = ":".join(map(str, position))
    return replace(
        CALL.validate_json(open_of_calls(at, _require(call), cipher)),
        call_signal="" if signal is None else open_of_calls(f"{at}:signal", signal, cipher),
        delta_repaired=int(delta or 0),
        result_repaired=repaired is not None,
    )


def consume_call(
    call: PendingCall, result: bytes | None, turns: int, cipher: Cipher
) -> PendingCall:
    """Return a call as it is after that many turns: the turn after its own consumes its result."""
    if result is not None:
        text = open_of_calls(to_inline_name(call.turn, call.call.id), result, cipher)
        call = replace(call, status=CallStatus.COMPLETED, result=text)
    return replace(call, consumed_in_turn=call.turn + 1) if call.turn < turns else call


def to_inline_name(turn: int, call_id: str) -> str:
    """Return the name of the field of CALLS with a result that the next turn brought itself."""
    return f"{turn}:inline:{call_id}"


def copy_calls(
    fields: Mapping[str, bytes],
    turns: int,
    calls: Sequence[PendingCall] | None,
    cipher: Cipher,
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
        CALL.validate_json(open_of_calls(name, value, cipher))
        for name, value in fields.items()
        if name in copied and is_call_field(name)
    ]
    for call in sorted(made, key=lambda call: (call.turn, -call.position)):
        copied[f"@{call.call.id}"] = f"{call.turn}:{call.position}"
    return copied | to_call_fields(calls or (), cipher)


def get_calls_of_turn(fields: Mapping[str, bytes], turn: int, cipher: Cipher) -> list[PendingCall]:
    """Return the calls in CALLS that a turn ended on, in call order."""
    calls = [
        CALL.validate_json(open_of_calls(name, value, cipher))
        for name, value in fields.items()
        if is_call_field(name)
    ]
    return sorted((call for call in calls if call.turn == turn), key=lambda call: call.position)


def is_call_field(name: str) -> bool:
    """Return whether a field of CALLS is a call itself: `<turn>:<position>`."""
    return re.fullmatch(r"\d+:\d+", name) is not None


def to_repair_entry(record: RepairRecord, cipher: Cipher) -> bytes:
    """Build an entry of REPAIRS. Older ones are dropped, so its place is none of its own."""
    return cipher.seal(RECORD.dump_json(record), "repair")


def from_repair_entries(entries: Sequence[bytes], last: int, cipher: Cipher) -> list[RepairRecord]:
    """Convert from REPAIRS, newest first; the last entry has number `last`."""
    return [
        replace(_open_repair(entry, cipher), number=last - age)
        for age, entry in enumerate(reversed(entries))
    ]


def _open_repair(entry: bytes, cipher: Cipher) -> RepairRecord:
    return RECORD.validate_json(cipher.open(entry, "repair"))


def to_segment_entry(segment: SegmentRecord, cipher: Cipher) -> bytes:
    """Build a field of SEGMENTS; the label is a field of LABELS."""
    packed = _SEGMENT.pack(segment.start, segment.stop) + segment.vector
    return cipher.seal(packed, f"segment {segment.number}")


def from_segment_entries(
    segments: Mapping[str, bytes], labels: Mapping[str, bytes], cipher: Cipher
) -> list[SegmentRecord]:
    """Convert from SEGMENTS and LABELS, in time order."""
    records = [
        _from_segment_entry(number, cipher.open(entry, f"segment {number}"), labels[number])
        for number, entry in segments.items()
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


def to_grown_episode_fields(episode: EpisodeRecord, cipher: Cipher) -> dict[str, str | bytes]:
    """Build the fields of EPISODES that new segments change."""
    name = f"centroid:{episode.id}"
    return {
        f"size:{episode.id}": json.dumps([episode.segments, episode.tokens]),
        name: cipher.seal(episode.centroid, name),
    }


def to_episode_fields(episode: EpisodeRecord, cipher: Cipher) -> Fields:
    """Build all fields of EPISODES for a newly built episode."""
    fields: Fields = {**to_grown_episode_fields(episode, cipher)}
    name = f"medoid:{episode.id}"
    return fields | {
        name: cipher.seal_text(episode.medoid, name),
        f"matched:{episode.id}": episode.matched,
    }


def to_built_fields(episode: EpisodeRecord, built: bytes, cipher: Cipher) -> Fields:
    """Build the field of BUILT of an episode."""
    return {episode.id: cipher.seal(built, f"built {episode.id}")}


def open_built(episode: str, sealed: bytes, cipher: Cipher) -> bytes:
    """Read a field of BUILT."""
    return cipher.open(sealed, f"built {episode}")


def from_set_fields(
    fields: Mapping[str, bytes], episodes: Mapping[str, bytes], cipher: Cipher
) -> EpisodeSet:
    """Convert from EPISODE_SET and EPISODES."""
    if "builds" not in fields:
        return EpisodeSet()
    counts = {name: int(fields[name]) for name in (*_COUNTS, "builds")}
    ids: list[str] = json.loads(fields.get("ids", b"[]"))
    return EpisodeSet(
        **counts,
        active=fields.get("active", b"").decode(),
        episodes=tuple(_from_episode_fields(id, episodes, cipher) for id in ids),
    )


def _from_episode_fields(id: str, fields: Mapping[str, bytes], cipher: Cipher) -> EpisodeRecord:
    segments, tokens = json.loads(fields[f"size:{id}"])
    return EpisodeRecord(
        id=id,
        centroid=cipher.open(fields[f"centroid:{id}"], f"centroid:{id}"),
        segments=segments,
        tokens=tokens,
        medoid=cipher.open_text(fields[f"medoid:{id}"], f"medoid:{id}"),
        matched=int(fields[f"matched:{id}"]),
    )


def to_hash(reply: Sequence[bytes] | Mapping[bytes, bytes]) -> dict[str, bytes]:
    """Convert from a hash as a script returns it, names and values in turn, or as a cluster's client does."""
    if isinstance(reply, Mapping):
        return {name.decode(): value for name, value in reply.items()}
    return {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}


def _require(value: bytes | None) -> bytes:
    assert value is not None, "a script writes all fields of a session"
    return value
