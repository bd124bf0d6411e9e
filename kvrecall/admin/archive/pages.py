"""The pages of a session file: out of the tiers of one data directory, and into those of another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kvrecall.admin.archive.format import Record, RecordKind, reading
from kvrecall.admin.archive.records import HEADER, FileHeader, Origin
from kvrecall.app.errors import BadSessionFile
from kvrecall.protocol.v1 import worker_pb2 as wire
from kvstore.errors import KvStoreError, PageError
from kvstore.format.page import (
    DTYPE_CODES,
    HEADER_BYTES,
    Blob,
    PageKey,
    PageLayout,
    first_sequence,
    parse_header,
    require_layout,
    seal,
    verify_checksum,
)
from kvstore.tiers.base import Tier
from services.catalog.records import SessionDump

_BATCH_PAGES = 16


@dataclass(frozen=True)
class Moved:
    """What went over: pages, their bytes, and how many the session has beside them."""

    pages: int = 0
    bytes: int = 0
    lost: int = 0

    def with_pages(self, blobs: Sequence[Blob]) -> "Moved":
        """With some that were lost before."""
        count = len(blobs)
        size = sum(len(blob) for blob in blobs)
        return Moved(self.pages + count, self.bytes + size, self.lost - count)


@dataclass(frozen=True)
class Checked:
    """A file that was read to its end: what it says first, and its records but for the pages."""

    header: FileHeader
    records: tuple[Record, ...]


def origin_of(layout: PageLayout) -> Origin:
    """What a file says of the model and layout of its rows."""
    return Origin(
        fingerprint=layout.fingerprint_hash.hex(),
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        dtype_code=DTYPE_CODES[layout.dtype],
    )


def header_record(session: str, layout: PageLayout, model: str, *, has_pages: bool) -> Record:
    """The first record of a file."""
    header = FileHeader(session, Path(model).name, origin_of(layout), has_pages)
    return Record(RecordKind.HEADER, HEADER.dump_python(header, mode="json"))


def page_count(dump: SessionDump, layout: PageLayout) -> int:
    """How many pages the committed rows of a session take."""
    return -(-_length(dump) // layout.page_tokens)


def page_records(dump: SessionDump, tiers: Sequence[Tier], layout: PageLayout) -> Iterator[Record]:
    """The pages of a session that can be read, its own and shared ones, each from the fastest tier that has it whole.

    Raises TierFailedError when a tier does not answer.
    """
    length = _length(dump)
    for index in range(page_count(dump, layout)):
        tokens = min(layout.page_tokens, length - index * layout.page_tokens)
        blob = _newest(tiers, PageKey(_owner(dump, index), index))
        if blob is not None and parse_header(blob).valid_tokens >= tokens:
            yield Record(RecordKind.PAGE, index, bytes(blob))


def checked(file: Path, layout: PageLayout) -> Checked:
    """Read a whole file: every record, every page's own checksum, and that all is of this model and layout.

    Raises BadSessionFile.
    """
    records = reading(file)
    header = _header(file, next(records, None), layout)
    kept = []
    for record in records:
        if record.kind is RecordKind.PAGE:
            _check_page(file, record, layout)
        else:
            kept.append(record)
    return Checked(header, tuple(kept))


@contextmanager
def pages_put(
    file: Path, dump: SessionDump, tier: Tier, layout: PageLayout, *, wanted: bool
) -> Iterator[Moved]:
    """Put a file's pages into a tier, under the session's own name and epoch; they go again if the body fails.

    Raises BadSessionFile, and what the tier refuses with.
    """
    moved = Moved(lost=page_count(dump, layout))
    keys = list[PageKey]()
    try:
        for batch in _batches(file) if wanted else ():
            pages = [_as_own(record, dump) for record in batch]
            keys += [key for key, _ in pages]
            tier.put(pages)
            moved = moved.with_pages([blob for _, blob in pages])
        tier.flush()
        yield moved
    except BaseException:
        with suppress(KvStoreError):
            tier.delete(keys)
            tier.flush()
        raise


def _header(file: Path, record: Record | None, layout: PageLayout) -> FileHeader:
    """Raises BadSessionFile unless the file's session belongs to this model and layout."""
    if record is None or record.kind is not RecordKind.HEADER:
        raise BadSessionFile(f"{file} does not say what it is")
    try:
        header = HEADER.validate_python(record.value)
    except ValidationError as error:
        raise BadSessionFile(
            f"{file} says what it is in a way that this kvrecall does not know: {error}"
        ) from error
    if header.origin != origin_of(layout):
        raise BadSessionFile(
            f"{file} is a session of another model ({header.model}) or of rows of another shape or "
            f"type: {header.origin}, here {origin_of(layout)}"
        )
    return header


def _check_page(file: Path, record: Record, layout: PageLayout) -> None:
    try:
        header = parse_header(record.data)
        require_layout(header, layout)
        verify_checksum(record.data, header.key)
    except PageError as error:
        raise BadSessionFile(f"{file}: {error}") from error
    if header.key.index != record.value or header.record_bytes != len(record.data):
        raise BadSessionFile(
            f"{file}: page {header.key.index} stands in the place of page {record.value}"
        )


def _newest(tiers: Sequence[Tier], key: PageKey) -> Blob | None:
    """The newest version of a page that any tier can give; a tier whose copy is damaged has none."""
    found: list[Blob] = []
    for tier in tiers:
        with suppress(PageError):
            found += [blob for blob in tier.get([key]) if blob is not None]
    return max(found, key=lambda blob: parse_header(blob).sequence, default=None)


def _batches(file: Path) -> Iterator[list[Record]]:
    batch: list[Record] = []
    for record in reading(file):
        if record.kind is RecordKind.PAGE:
            batch.append(record)
        if len(batch) == _BATCH_PAGES:
            yield batch
            batch = []
    yield batch


def _as_own(record: Record, dump: SessionDump) -> tuple[PageKey, bytes]:
    """The page as if the session had written it, whoever did: the same payload under another header."""
    key = PageKey(dump.session.id, int(record.value))
    sequence = first_sequence(dump.session.epoch) + key.index
    header = replace(parse_header(record.data), key=key, sequence=sequence)
    return key, seal(header, record.data[HEADER_BYTES:])


def _owner(dump: SessionDump, index: int) -> str:
    return next((each.owner for each in dump.session.shared if index < each.pages), dump.session.id)


def _length(dump: SessionDump) -> int:
    return int(wire.SessionState.FromString(dump.worker_state).length)
