"""The pages of a session archive: read from the tiers of one data directory, put into another's."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from kvrecall.domain.page_ids import PageId, join_ids, make_random_id, split_ids
from kvrecall.protocol.v1 import worker_pb2 as pb
from kvrecall_server.admin.archive.format import read_records
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.admin.archive.records import HEADER, FileHeader, Origin
from kvrecall_server.admin.archive.signing import ArchiveKey, Signature
from kvrecall_server.app.errors import BadSessionFile
from kvrecall_server.app.progress import Report
from kvstore.errors import KvStoreError, PageError
from kvstore.format.encryption import PageKeys
from kvstore.format.page import (
    DTYPE_CODES,
    HEADER_BYTES,
    NO_KEY,
    Blob,
    PageHeader,
    PageLayout,
    parse_header,
    seal,
    verify_checksum,
)
from kvstore.tiers.base import Tier
from services.catalog.records import SessionDump

_BATCH_PAGES = 16
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


def count_pages(dump: SessionDump) -> int:
    """Return how many pages a session in a catalog has."""
    return len(split_ids(dump.page_ids))


def read_pages(dump: SessionDump, tiers: Sequence[Tier], key: bytes) -> Iterator[Record]:
    """Read the pages of a session, in their order, as records; lost ones are skipped.

    `key`: of its tenant's pages (`derive_page_key`): a file has them plain. Raises TierFailedError when a
    tier does not answer.
    """
    keys = PageKeys()
    keys.add(key)
    for index, page_id in enumerate(split_ids(dump.page_ids)):
        blob = _read_intact(tiers, page_id, keys)
        if blob is not None:
            header = replace(parse_header(blob), key_id=NO_KEY)
            yield Record(RecordKind.PAGE, index, seal(header, bytes(blob[HEADER_BYTES:])))


def name_pages(dump: SessionDump, page_tokens: int) -> SessionDump:
    """Give a session from a file ids for its pages.

    Random ones, so that no other session shares them: a file may have other rows than its tokens'.
    """
    pages = pb.SessionState.FromString(dump.worker_state).length // page_tokens
    return replace(dump, page_ids=join_ids([make_random_id() for _ in range(pages)]))


def check_archive(file: Path, report: Report, key: ArchiveKey | None = None) -> CheckedArchive:
    """Read a whole file and check every record and every page's checksum; report its bytes.

    A signature by `key` is verified. Raises BadSessionFile.
    """
    records = read_records(file, key)
    header = _read_header(file, next(records, None))
    others = []
    origins = set[Origin]()
    signature = Signature.NONE
    last_page = -1
    size, done = file.stat().st_size, 0
    for record in records:
        done += len(record.data)
        report(done, size)
        if record.kind is RecordKind.PAGE:
            origins.add(_check_page(file, record, last_page))
            last_page = record.value
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
    file: Path, dump: SessionDump, tier: Tier, key: bytes, *, wanted: bool
) -> Iterator[PagesMoved]:
    """Put a file's pages into a tier, under the ids that the session has for them.

    They are deleted again if the body fails. `key`: of its tenant's pages, with which they are encrypted.
    Without `wanted` no page is put. Raises BadSessionFile, and the tier's errors.
    """
    keys = PageKeys()
    key_id = keys.add(key)
    ids = split_ids(dump.page_ids)
    moved = PagesMoved(missing=len(ids))
    try:
        for batch in _read_batches(file) if wanted else ():
            plain = [_reseal(file, record, ids, key_id) for record in batch]
            pages = [(page_id, keys.encrypt(page)) for page_id, page in plain]
            tier.put(pages)
            moved = moved.with_pages([blob for _, blob in pages])
        tier.flush()
        yield moved
    except BaseException:
        with suppress(KvStoreError):
            tier.delete(ids)
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


def _check_page(file: Path, record: Record, last_page: int) -> Origin:
    """Check a page that follows page `last_page`, and return whose it is. Raises BadSessionFile."""
    try:
        header = parse_header(record.data)
        verify_checksum(record.data, header.id)
    except PageError as error:
        raise BadSessionFile(f"{file}: {error}") from error
    if not isinstance(record.value, int) or record.value <= last_page:
        raise BadSessionFile(
            f"{file} is damaged: page {record.value!r} stands behind page {last_page}"
        )
    if header.record_bytes != len(record.data):
        raise BadSessionFile(
            f"{file} is damaged: page {record.value} has another size than it says"
        )
    if header.is_encrypted:
        raise BadSessionFile(f"{file} is damaged: page {record.value} is encrypted")
    return get_origin(header)


def _read_intact(tiers: Sequence[Tier], page_id: PageId, keys: PageKeys) -> Blob | None:
    """Return a page, plain, from the first tier that has it; a damaged or locked copy counts as none."""
    for tier in tiers:
        with suppress(PageError):
            (blob,) = tier.get([page_id])
            if blob is not None:
                return keys.decrypt(blob)
    return None


def _read_batches(file: Path) -> Iterator[list[Record]]:
    batch: list[Record] = []
    for record in read_records(file):
        if record.kind is RecordKind.PAGE:
            batch.append(record)
        if len(batch) == _BATCH_PAGES:
            yield batch
            batch = []
    yield batch


def _reseal(
    file: Path, record: Record, ids: Sequence[PageId], key_id: bytes
) -> tuple[PageId, bytes]:
    """Return a page as written now under its id, plain: the payload with another header."""
    if record.value >= len(ids):
        raise BadSessionFile(
            f"{file} is damaged: it has page {record.value}, and its session has {len(ids)}"
        )
    page_id = ids[record.value]
    now = int(time.time())
    header = replace(parse_header(record.data), id=page_id, written_at=now, key_id=key_id)
    return page_id, seal(header, record.data[HEADER_BYTES:])
