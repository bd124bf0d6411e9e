"""What a catalog knows of a session, as records of a session file, and back."""

from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version

from pydantic import TypeAdapter, ValidationError

from kvrecall.admin.archive.format import Record, RecordKind
from kvrecall.app.errors import BadSessionFile
from kvrecall.domain.errors import UnknownCall
from kvrecall.domain.messages import ToolCall
from kvrecall.domain.session import Session, Turn
from kvrecall.domain.tool_calls import PendingCall
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


@dataclass(frozen=True)
class Origin:
    """The model and layout that a session's tokens and rows belong to: they are of use to no other.

    `fingerprint` is the hash of the model's fingerprint that page headers carry, in hexadecimal digits.
    """

    fingerprint: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    page_tokens: int
    dtype_code: int


@dataclass(frozen=True)
class FileHeader:
    """What a session file says first. `model` is a name, for people; `kvrecall` the version that wrote the file."""

    session: str
    model: str
    origin: Origin
    has_pages: bool
    kvrecall: str = field(default_factory=lambda: version("kvrecall"))


HEADER = TypeAdapter(FileHeader)
SESSION = TypeAdapter(Session)
TURN = TypeAdapter(Turn)
CALL = TypeAdapter(PendingCall)
REPAIR = TypeAdapter(RepairRecord)
EPISODES = TypeAdapter(EpisodeSet)
EPISODE = TypeAdapter(EpisodeRecord)
SEGMENT = TypeAdapter(SegmentRecord)


async def dumped(catalog: Catalog, session: str) -> SessionDump:
    """Everything that the catalog knows of a session. Raises UnknownSession, CatalogError."""
    found = await catalog.sessions.get(session)
    turns = [turn async for turn in _turns(catalog, session)]
    episodes = await catalog.episodes.get(session)
    return SessionDump(
        session=found,
        worker_state=await catalog.sessions.get_worker_state(session),
        turns=tuple(turns),
        calls=await _calls(catalog, found, turns),
        repairs=tuple(reversed(await catalog.repairs.get_latest(session, REPAIRS_RETAINED))),
        episodes=episodes,
        segments=tuple(await catalog.episodes.get_segments(session)),
        built=tuple(
            [await catalog.episodes.get_built(session, episode.id) for episode in episodes.episodes]
        ),
    )


async def _turns(catalog: Catalog, session: str) -> AsyncIterator[Turn]:
    last = 0
    while some := await catalog.turns.get_after(session, last, _TURNS_AT_ONCE):
        for turn in some:
            yield turn
        last = some[-1].number


async def _calls(
    catalog: Catalog, session: Session, turns: Iterable[Turn]
) -> tuple[PendingCall, ...]:
    """The session's calls: of several with one id the newest, which is the only one that anybody can ask for."""
    found = {(call.turn, call.position): call for call in session.calls}
    for id in {call.id for turn in turns for call in _made_in(turn)}:
        with suppress(UnknownCall):  # one that was recorded, with its result, within a turn
            call = await catalog.tool_calls.get(session.id, id)
            found.setdefault((call.turn, call.position), call)
    return tuple(found[at] for at in sorted(found))


def _made_in(turn: Turn) -> Iterator[ToolCall]:
    said = turn.outcome.message
    for message in (*turn.messages, *([] if said is None else [said])):
        yield from message.tool_calls


def records_of(dump: SessionDump) -> Iterator[Record]:
    """The records of a session but for its pages."""
    yield Record(RecordKind.SESSION, SESSION.dump_python(dump.session, mode="json"))
    yield Record(RecordKind.STATE, data=dump.worker_state)
    for turn in dump.turns:
        value = TURN.dump_python(replace(turn, token_ids=()), mode="json")
        yield Record(RecordKind.TURN, value, encode_tokens(turn.token_ids))
    for call in dump.calls:
        yield Record(RecordKind.CALL, CALL.dump_python(call, mode="json"))
    for repair in dump.repairs:
        yield Record(RecordKind.REPAIR, REPAIR.dump_python(repair, mode="json"))
    yield Record(
        RecordKind.EPISODES, EPISODES.dump_python(replace(dump.episodes, episodes=()), mode="json")
    )
    for episode, built in zip(dump.episodes.episodes, dump.built, strict=True):
        value = EPISODE.dump_python(replace(episode, centroid=b""), mode="json")
        yield Record(RecordKind.EPISODE, [value, len(episode.centroid)], episode.centroid + built)
    for segment in dump.segments:
        yield Record(
            RecordKind.SEGMENT,
            SEGMENT.dump_python(replace(segment, vector=b""), mode="json"),
            segment.vector,
        )


def dump_of(records: Iterable[Record], session: str) -> SessionDump:
    """The session of its records, under the id `session`, and at an epoch that nobody had.

    Raises BadSessionFile for a value of another form.
    """
    by_kind: dict[RecordKind, list[Record]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record)
    try:
        return _dump(by_kind, session)
    except (ValidationError, ValueError, TypeError, LookupError) as error:
        raise BadSessionFile(
            f"the file has a value that this kvrecall does not know: {error}"
        ) from error


def _dump(found: dict[RecordKind, list[Record]], session: str) -> SessionDump:
    (kept,), (state,), (counts,) = (found[kind] for kind in _ONCE)
    known = SESSION.validate_python(kept.value)
    episodes = list[EpisodeRecord]()
    built = list[bytes]()
    for record in found.get(RecordKind.EPISODE, ()):
        value, size = record.value
        episodes.append(replace(EPISODE.validate_python(value), centroid=record.data[:size]))
        built.append(record.data[size:])
    return SessionDump(
        session=replace(known, id=session, epoch=known.epoch + 1, worker="", shared=()),
        worker_state=state.data,
        turns=tuple(_turn(each, session) for each in found.get(RecordKind.TURN, ())),
        calls=tuple(CALL.validate_python(each.value) for each in found.get(RecordKind.CALL, ())),
        repairs=tuple(
            REPAIR.validate_python(each.value) for each in found.get(RecordKind.REPAIR, ())
        ),
        episodes=replace(EPISODES.validate_python(counts.value), episodes=tuple(episodes)),
        segments=tuple(
            replace(SEGMENT.validate_python(each.value), vector=each.data)
            for each in found.get(RecordKind.SEGMENT, ())
        ),
        built=tuple(built),
    )


_ONCE = (RecordKind.SESSION, RecordKind.STATE, RecordKind.EPISODES)


def _turn(record: Record, session: str) -> Turn:
    turn = TURN.validate_python(record.value)
    outcome = replace(turn.outcome, session=session)
    return replace(turn, session=session, outcome=outcome, token_ids=decode_tokens(record.data))
