"""The pages of a session archive: read from the tiers of one data directory, put into another's."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kvrecall.domain.page_ids import join_ids, make_random_id
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.archive.format import read_records
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.admin.archive.records import HEADER, FileHeader, Origin
from kvrecall_server.admin.archive.signing import ArchiveKey, Signature
from kvrecall_server.admin.commit_history import find_writer, to_commit_history
from kvrecall_server.app.errors import BadSessionFile
from kvrecall_server.app.progress import Report
from kvstore.errors import KvStoreError, PageError
from kvstore.format.page import (
    DTYPE_CODES,
    HEADER_BYTES,
    Blob,
    PageHeader,
    PageKey,
    PageLayout,
    first_sequence,
    parse_header,
    seal,
    verify_checksum,
)
from kvstore.tiers.base import Tier
from services.catalog.records import SessionDump
from workers.engine.stored.written import count_written, read_dropped

_BATCH_PAGES = 16
# More than any session has.
_MOST_PAGES = 1 << 31
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}


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
    """A file that was read to its end: its header, its records without the pages, and whose these are."""

    header: FileHeader
    records: tuple[Record, ...]
    page_origins: frozenset[Origin]
    signature: Signature


def get_origin(rows: PageLayout | PageHeader) -> Origin:
    """Return the model and layout of rows, as an archive has them: of a layout, or of a page."""
    return Origin(
        fingerprint=rows.fingerprint_hash.hex(),
        n_layers=rows.n_layers,
        n_kv_heads=rows.n_kv_heads,
        head_dim=rows.head_dim,
        page_tokens=rows.page_tokens,
        dtype_code=rows.dtype_code,
        side_layers=rows.side_layers,
        latent=rows.latent,
    )


def build_header(session_id: str, origin: Origin, model: str, *, has_pages: bool) -> Record:
    """Build the first record of a file."""
    header = FileHeader(session_id, Path(model).name, origin, has_pages)
    return Record(RecordKind.HEADER, HEADER.dump_python(header, mode="json"))


def count_pages(dump: SessionDump, page_tokens: int) -> int:
    """Return how many pages a session has written, dropped ones included."""
    return -(-_get_length(dump, page_tokens) // page_tokens)


def read_pages(dump: SessionDump, tiers: Sequence[Tier], page_tokens: int) -> Iterator[Record]:
    """Read the pages of a session, its own and shared ones, as records.

    Each is the newest version in any tier; pages without all their tokens, committed, are skipped.
    Raises TierFailedError when a tier does not answer.
    """
    length = _get_length(dump, page_tokens)
    own = to_commit_history(dump.history)
    for index in range(count_pages(dump, page_tokens)):
        start = index * page_tokens
        owner, history = find_writer(index, dump.session.id, own, dump.session.shared)
        blob = _read_newest(tiers, PageKey(owner, index))
        if blob is None:
            continue
        header = parse_header(blob)
        valid = min(header.valid_tokens, history.committed_tokens(header.epoch) - start)
        if valid >= min(page_tokens, length - start):
            yield Record(RecordKind.PAGE, index, bytes(blob))


def make_page_ids(dump: SessionDump, page_tokens: int) -> bytes:
    """Make ids for the pages of a session from a file, joined.

    Random ones, so that no other session shares them: a file may have other rows than its tokens'.
    """
    return join_ids([make_random_id() for _ in range(count_pages(dump, page_tokens))])


def check_archive(file: Path, report: Report, key: ArchiveKey | None = None) -> CheckedArchive:
    """Read a whole file and check every record and every page's checksum; report its bytes.

    A signature by `key` is verified. Raises BadSessionFile.
    """
    records = read_records(file, key)
    header = _read_header(file, next(records, None))
    others = []
    origins = set[Origin]()
    signature = Signature.NONE
    size, done = file.stat().st_size, 0
    for record in records:
        done += len(record.data)
        report(done, size)
        if record.kind is RecordKind.PAGE:
            origins.add(_check_page(file, record))
        elif record.kind is RecordKind.SIGNATURE:
            signature = Signature.OWN if record.data else Signature.FOREIGN
        else:
            others.append(record)
    return CheckedArchive(header, tuple(others), frozenset(origins), signature)


def require_origin(file: Path, archive: CheckedArchive, origin: Origin) -> None:
    """Raise BadSessionFile unless session and pages of a file are of this model and layout."""
    header = archive.header
    if header.origin != origin:
        raise BadSessionFile(
            f"{file} is a session of another model ({header.model}) or of rows of another shape or "
            f"type: {_compare(header.origin, origin)}; name its model with --model, or a data "
            "directory of its model with --data"
        )
    if archive.page_origins - {origin}:
        raise BadSessionFile(f"{file} is damaged: it has pages of another model; export it again")


@contextmanager
def put_pages(
    file: Path, dump: SessionDump, tier: Tier, page_tokens: int, *, wanted: bool
) -> Iterator[PagesMoved]:
    """Put a file's pages into a tier, under the session's own id and epoch.

    They are deleted again if the body fails. Without `wanted` no page is put. Raises
    BadSessionFile, and the tier's errors.
    """
    moved = PagesMoved(missing=count_pages(dump, page_tokens))
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


def _read_header(file: Path, record: Record | None) -> FileHeader:
    if record is None or record.kind is not RecordKind.HEADER:
        raise BadSessionFile(f"{file} has no header; export the session again")
    try:
        return HEADER.validate_python(record.value)
    except ValidationError as error:
        raise BadSessionFile(
            f"{file} has a header that this kvrecall does not know: {error}; "
            "import it with the kvrecall that wrote it"
        ) from error


def _compare(found: Origin, expected: Origin) -> str:
    """Describe in words how the rows of a file differ from those of a data directory."""
    shapes = [
        f"{each.n_layers + each.side_layers} layers of {each.n_kv_heads} KV heads of {each.head_dim} in "
        f"{_DTYPE_NAMES.get(each.dtype_code, 'another data type')}"
        for each in (found, expected)
    ]
    if shapes[0] != shapes[1]:
        return f"{shapes[0]}, here {shapes[1]}"
    return f"{shapes[0]} as here, but computed by other weights"


def _check_page(file: Path, record: Record) -> Origin:
    """Check a page, and return whose it is. Raises BadSessionFile."""
    try:
        header = parse_header(record.data)
        verify_checksum(record.data, header.key)
    except PageError as error:
        raise BadSessionFile(f"{file}: {error}") from error
    if header.key.index >= _MOST_PAGES:
        raise BadSessionFile(f"{file} is damaged: it has page {header.key.index}")
    if header.key.index != record.value or header.record_bytes != len(record.data):
        raise BadSessionFile(
            f"{file} is damaged: page {header.key.index} stands in the place of page {record.value}"
        )
    return get_origin(header)


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


def _get_length(dump: SessionDump, page_tokens: int) -> int:
    state = pb.SessionState.FromString(dump.worker_state)
    return count_written(state.length, read_dropped(state), page_tokens)
