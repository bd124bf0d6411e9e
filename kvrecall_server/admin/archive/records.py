"""Conversion between a session in a catalog and the records of an archive."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from pydantic import TypeAdapter, ValidationError

from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.sessions.session import Session, Turn
from kvrecall.domain.settings.invalid import find_invalid
from kvrecall.domain.tool_calls import PendingCall, ToolOutput, summarize_pieces
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.app.errors import BadSessionFile
from services.catalog.base import Catalog
from services.catalog.records import (
    REPAIRS_RETAINED,
    EpisodeRecord,
    EpisodeSet,
    RepairRecord,
    SegmentRecord,
    SessionDump,
)
from services.catalog.serialization import decode_tokens, encode_tokens

_TURNS_AT_ONCE = 64
_PIECES_AT_ONCE = 256


@dataclass(frozen=True)
class Origin:
    """The model and layout that a session's tokens and rows belong to; no other can use them.

    `fingerprint` is the hash of the model's fingerprint in page headers, in hexadecimal digits.
    """

    fingerprint: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype_code: int
    side_layers: int = 0
    latent: bool = False


@dataclass(frozen=True)
class FileHeader:
    """The header of an archive.

    `model` is a name for people, `kvrecall` the version of the program that wrote the file.
    """

    session: str
    model: str
    origin: Origin
    has_pages: bool
    kvrecall: str = field(default_factory=lambda: version("kvrecall"))


HEADER = TypeAdapter(FileHeader)
SESSION = TypeAdapter(Session)
TURN = TypeAdapter(Turn)
CALL = TypeAdapter(PendingCall)
PIECES = TypeAdapter(dict[int, str])
REPAIR = TypeAdapter(RepairRecord)
EPISODES = TypeAdapter(EpisodeSet)
EPISODE = TypeAdapter(EpisodeRecord)
SEGMENT = TypeAdapter(SegmentRecord)

# What is raised by values of another form than that of a record.
_MALFORMED = (
    ValidationError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
)
# Kinds of which a file has exactly one record.
_SINGLE = (RecordKind.SESSION, RecordKind.STATE, RecordKind.EPISODES)


async def dump_session(catalog: Catalog, session_id: str) -> SessionDump:
    """Read all that the catalog stores of a session. Raises UnknownSession, CatalogError."""
    session = await catalog.sessions.get(session_id)
    turns = [turn async for turn in _read_turns(catalog, session_id)]
    repairs = await catalog.repairs.get_latest(session_id, REPAIRS_RETAINED)
    episodes = await catalog.episodes.get(session_id)
    built = [
        await catalog.episodes.get_built(session_id, episode.id) for episode in episodes.episodes
    ]
    calls = await _read_calls(catalog, session, turns)
    return SessionDump(
        session=session,
        worker_state=await catalog.sessions.get_worker_state(session_id),
        turns=tuple(turns),
        calls=calls,
        pieces={
            (call.turn, call.position): await _read_pieces(catalog, session_id, call)
            for call in calls
            if call.output.pieces
        },
        repairs=tuple(reversed(repairs)),
        episodes=episodes,
        segments=tuple(await catalog.episodes.get_segments(session_id)),
        built=tuple(built),
        page_ids=await catalog.sessions.get_page_ids(session_id),
    )


async def _read_turns(catalog: Catalog, session_id: str) -> AsyncIterator[Turn]:
    last = 0
    while turns := await catalog.turns.get_after(session_id, last, _TURNS_AT_ONCE):
        for turn in turns:
            yield turn
        last = turns[-1].number


async def _read_calls(
    catalog: Catalog, session: Session, turns: Iterable[Turn]
) -> tuple[PendingCall, ...]:
    """Read the session's calls: of several with one id only the newest can be read."""
    calls = {(call.turn, call.position): call for call in session.calls}
    for call_id in {call.id for turn in turns for call in _get_tool_calls(turn)}:
        with suppress(UnknownCall):  # one that was recorded, with its result, within a turn
            call = await catalog.tool_calls.get(session.id, call_id)
            calls.setdefault((call.turn, call.position), call)
    return tuple(calls[at] for at in sorted(calls))


async def _read_pieces(catalog: Catalog, session_id: str, call: PendingCall) -> dict[int, str]:
    pieces: dict[int, str] = {}
    first = 0
    while len(pieces) < call.output.pieces and first < call.output.next_index:
        found = await catalog.tool_calls.get_pieces(session_id, call, first, _PIECES_AT_ONCE)
        pieces |= enumerate(found, first)
        first += len(found) or 1
    return pieces


def _get_tool_calls(turn: Turn) -> Iterator[ToolCall]:
    reply = turn.outcome.message
    for message in (*turn.messages, *([] if reply is None else [reply])):
        yield from message.tool_calls


def to_records(dump: SessionDump) -> Iterator[Record]:
    """Convert a session to records, without its pages."""
    yield Record(RecordKind.SESSION, SESSION.dump_python(dump.session, mode="json"))
    yield Record(RecordKind.STATE, data=dump.worker_state)
    for turn in dump.turns:
        value = TURN.dump_python(replace(turn, token_ids=()), mode="json")
        yield Record(RecordKind.TURN, value, encode_tokens(turn.token_ids))
    for call in dump.calls:
        pieces = dump.pieces.get((call.turn, call.position), {})
        value = CALL.dump_python(
            replace(call, output=ToolOutput(first_event_at=call.output.first_event_at)), mode="json"
        )
        yield Record(
            RecordKind.CALL, value | {"pieces": PIECES.dump_python(dict(pieces), mode="json")}
        )
    for repair in dump.repairs:
        yield Record(RecordKind.REPAIR, REPAIR.dump_python(repair, mode="json"))
    yield from _to_episode_records(dump)


def _to_episode_records(dump: SessionDump) -> Iterator[Record]:
    episodes = EPISODES.dump_python(replace(dump.episodes, episodes=()), mode="json")
    yield Record(RecordKind.EPISODES, episodes)
    for episode, built in zip(dump.episodes.episodes, dump.built, strict=True):
        value = EPISODE.dump_python(replace(episode, centroid=b""), mode="json")
        yield Record(RecordKind.EPISODE, [value, len(episode.centroid)], episode.centroid + built)
    for segment in dump.segments:
        value = SEGMENT.dump_python(replace(segment, vector=b""), mode="json")
        yield Record(RecordKind.SEGMENT, value, segment.vector)


def from_records(records: Iterable[Record], session_id: str, tenant: str) -> SessionDump:
    """Convert from records, under the id `session_id` and a new epoch, to a session of `tenant`.

    The tenant that a file names is not believed. Raises BadSessionFile for a value of another form.
    """
    by_kind: dict[RecordKind, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    try:
        dump = _build_dump(by_kind, session_id)
    except _MALFORMED as error:
        raise BadSessionFile(
            f"the file has a value that this kvrecall does not know: {_describe(error)}; "
            "import it with the kvrecall that wrote it"
        ) from error
    settings = replace(dump.session.settings, tenant=tenant)
    return replace(dump, session=replace(dump.session, settings=settings))


def _describe(error: Exception) -> str:
    """Name the first value of another form, where the error knows its place."""
    if not isinstance(error, ValidationError):
        return str(error)
    return ": ".join(find_invalid(error))


def _build_dump(by_kind: dict[RecordKind, list[Record]], session_id: str) -> SessionDump:
    (stored,), (state,), (episode_set,) = (by_kind[kind] for kind in _SINGLE)
    session = SESSION.validate_python(stored.value)
    episodes, built = _build_episodes(by_kind.get(RecordKind.EPISODE, ()))
    calls = [_build_call(each) for each in by_kind.get(RecordKind.CALL, ())]
    repairs = by_kind.get(RecordKind.REPAIR, ())
    return SessionDump(
        session=replace(session, id=session_id, epoch=session.epoch + 1, worker=""),
        worker_state=state.data,
        turns=tuple(_build_turn(each, session_id) for each in by_kind.get(RecordKind.TURN, ())),
        calls=tuple(call for call, _ in calls),
        pieces={(call.turn, call.position): pieces for call, pieces in calls if pieces},
        repairs=tuple(REPAIR.validate_python(each.value) for each in repairs),
        episodes=replace(EPISODES.validate_python(episode_set.value), episodes=episodes),
        segments=tuple(
            replace(SEGMENT.validate_python(each.value), vector=each.data)
            for each in by_kind.get(RecordKind.SEGMENT, ())
        ),
        built=built,
    )


def _build_episodes(
    records: Iterable[Record],
) -> tuple[tuple[EpisodeRecord, ...], tuple[bytes, ...]]:
    """Return the episodes, and their serialized pb.Episode messages."""
    episodes = list[EpisodeRecord]()
    built = list[bytes]()
    for record in records:
        value, centroid_bytes = record.value
        centroid = record.data[:centroid_bytes]
        episodes.append(replace(EPISODE.validate_python(value), centroid=centroid))
        built.append(record.data[centroid_bytes:])
    return tuple(episodes), tuple(built)


def _build_call(record: Record) -> tuple[PendingCall, Mapping[int, str]]:
    """Return a call, and the pieces of its output."""
    call = CALL.validate_python(record.value)
    pieces = PIECES.validate_python(record.value.get("pieces", {}))
    output = summarize_pieces(pieces, call.delta_due)
    output = replace(output, first_event_at=call.output.first_event_at)
    return replace(call, output=output), pieces


def _build_turn(record: Record, session_id: str) -> Turn:
    turn = TURN.validate_python(record.value)
    outcome = replace(turn.outcome, session=session_id)
    token_ids = decode_tokens(record.data)
    return replace(turn, session=session_id, outcome=outcome, token_ids=token_ids)
