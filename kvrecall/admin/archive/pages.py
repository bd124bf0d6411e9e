"""The pages of a session archive: read from the tiers of one data directory, put into another's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kvrecall.admin.archive.format import read_records
from kvrecall.admin.archive.record import Record, RecordKind
from kvrecall.admin.archive.records import HEADER, FileHeader, Origin
from kvrecall.admin.commit_history import find_writer, to_commit_history
from kvrecall.app.errors import BadSessionFile
from kvrecall.protocol.v1 import worker_pb2 as pb
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
class PagesMoved:
    """Counts of a transfer: pages, their bytes, and pages of the session that are `missing`."""

    pages: int = 0
    bytes: int = 0
    missing: int = 0

    def with_pages(self, blobs: Sequence[Blob]) -> "PagesMoved":
        """Return the counts after some missing pages were moved."""
        count = len(blobs)
        size = sum(len(blob) for blob in blobs)
        return PagesMoved(self.pages + count, self.bytes + size, self.missing - count)


@dataclass(frozen=True)
class CheckedArchive:
    """A file that was read to its end: its header, and its records without the pages."""

    header: FileHeader
    records: tuple[Record, ...]


def get_origin(layout: PageLayout) -> Origin:
    """Return the model and layout of rows, as an archive has them."""
    return Origin(
        fingerprint=layout.fingerprint_hash.hex(),
        n_layers=layout.n_layers,
        n_kv_heads=layout.n_kv_heads,
        head_dim=layout.head_dim,
        page_tokens=layout.page_tokens,
        dtype_code=DTYPE_CODES[layout.dtype],
    )


def build_header(session_id: str, layout: PageLayout, model: str, *, has_pages: bool) -> Record:
    """Build the first record of a file."""
    header = FileHeader(session_id, Path(model).name, get_origin(layout), has_pages)
    return Record(RecordKind.HEADER, HEADER.dump_python(header, mode="json"))


def count_pages(dump: SessionDump, layout: PageLayout) -> int:
    """Return how many pages the committed rows of a session take."""
    return -(-_get_length(dump) // layout.page_tokens)


def read_pages(dump: SessionDump, tiers: Sequence[Tier], layout: PageLayout) -> Iterator[Record]:
    """Read the pages of a session, its own and shared ones, as records.

    Each is the newest version in any tier; pages without all their tokens, committed, are skipped.
    Raises TierFailedError when a tier does not answer.
    """
    length = _get_length(dump)
    own = to_commit_history(dump.history)
    for index in range(count_pages(dump, layout)):
        start = index * layout.page_tokens
        owner, history = find_writer(index, dump.session.id, own, dump.session.shared)
        blob = _read_newest(tiers, PageKey(owner, index))
        if blob is None:
            continue
        header = parse_header(blob)
        valid = min(header.valid_tokens, history.committed_tokens(header.epoch) - start)
        if valid >= min(layout.page_tokens, length - start):
            yield Record(RecordKind.PAGE, index, bytes(blob))


def check_archive(file: Path, layout: PageLayout) -> CheckedArchive:
    """Read a whole file and check every record, every page's checksum, model and layout.

    Raises BadSessionFile.
    """
    records = read_records(file)
    header = _read_header(file, next(records, None), layout)
    others = []
    for record in records:
        if record.kind is RecordKind.PAGE:
            _check_page(file, record, layout)
        else:
            others.append(record)
    return CheckedArchive(header, tuple(others))


@contextmanager
def put_pages(
    file: Path, dump: SessionDump, tier: Tier, layout: PageLayout, *, wanted: bool
) -> Iterator[PagesMoved]:
    """Put a file's pages into a tier, under the session's own id and epoch.

    They are deleted again if the body fails. Without `wanted` no page is put. Raises
    BadSessionFile, and the tier's errors.
    """
    moved = PagesMoved(missing=count_pages(dump, layout))
    keys = list[PageKey]()
    try:
        for batch in _read_batches(file) if wanted else ():
            pages = [_reseal(record, dump) for record in batch]
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


def _read_header(file: Path, record: Record | None, layout: PageLayout) -> FileHeader:
    """Read the header. Raises BadSessionFile unless the session is of this model and layout."""
    if record is None or record.kind is not RecordKind.HEADER:
        raise BadSessionFile(f"{file} has no header; export the session again")
    try:
        header = HEADER.validate_python(record.value)
    except ValidationError as error:
        raise BadSessionFile(
            f"{file} has a header that this kvrecall does not know: {error}; "
            "import it with the kvrecall that wrote it"
        ) from error
    if header.origin != get_origin(layout):
        raise BadSessionFile(
            f"{file} is a session of another model ({header.model}) or of rows of another shape or "
            f"type: {header.origin}, here {get_origin(layout)}; name its model with --model"
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
            f"{file} is damaged: page {header.key.index} stands in the place of page {record.value}"
        )


def _read_newest(tiers: Sequence[Tier], key: PageKey) -> Blob | None:
    """Return the newest version of a page in any tier; a damaged copy counts as none."""
    blobs: list[Blob] = []
    for tier in tiers:
        with suppress(PageError):
            blobs += [blob for blob in tier.get([key]) if blob is not None]
    return max(blobs, key=lambda blob: parse_header(blob).sequence, default=None)


def _read_batches(file: Path) -> Iterator[list[Record]]:
    batch: list[Record] = []
    for record in read_records(file):
        if record.kind is RecordKind.PAGE:
            batch.append(record)
        if len(batch) == _BATCH_PAGES:
            yield batch
            batch = []
    yield batch


def _reseal(record: Record, dump: SessionDump) -> tuple[PageKey, bytes]:
    """Return the page as if the session itself had written it: the payload under another header."""
    key = PageKey(dump.session.id, int(record.value))
    sequence = first_sequence(dump.session.epoch) + key.index
    header = replace(parse_header(record.data), key=key, sequence=sequence)
    return key, seal(header, record.data[HEADER_BYTES:])


def _get_length(dump: SessionDump) -> int:
    return int(pb.SessionState.FromString(dump.worker_state).length)
