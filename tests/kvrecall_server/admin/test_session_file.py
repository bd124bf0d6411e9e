"""The format of a session archive: files are read as written, damaged ones are refused."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrecall_server.admin.archive.format import MAGIC, VERSION, read_records, write_archive
from kvrecall_server.admin.archive.record import Record, RecordKind
from kvrecall_server.app.errors import BadSessionFile

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ENDS = (RecordKind.SIGNATURE, RecordKind.END)
kinds = st.sampled_from([kind for kind in RecordKind if kind not in ENDS])
records = st.lists(st.builds(Record, kinds, values, st.binary(max_size=200)), max_size=6)
SOME = [
    Record(RecordKind.HEADER, {"session": "s_1"}),
    Record(RecordKind.PAGE, 3, bytes(range(256)) * 8),
]


def write(path: Path, records: list[Record]) -> Path:
    """Write a file with these records."""
    with write_archive(path) as writer:
        for record in records:
            writer.add(record)
    return path


@given(records)
@settings(max_examples=60)
def test_records_are_read_as_they_were_written(some: list[Record]) -> None:
    with TemporaryDirectory() as folder:
        assert list(read_records(write(Path(folder) / "s", some))) == some


@given(st.data())
@settings(max_examples=150)
def test_a_file_with_any_bit_flipped_is_refused(data: Any) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "s", SOME)
        raw = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        with pytest.raises(BadSessionFile):
            list(read_records(path))


@given(st.data())
@settings(max_examples=60)
def test_a_truncated_or_extended_file_is_refused(data: Any) -> None:
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "s", SOME)
        raw = path.read_bytes()
        path.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
        with pytest.raises(BadSessionFile):
            list(read_records(path))
        path.write_bytes(raw + data.draw(st.binary(min_size=1, max_size=40)))
        with pytest.raises(BadSessionFile, match="damaged"):
            list(read_records(path))


def test_a_damaged_length_allocates_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(MAGIC + VERSION.to_bytes(2, "little") + b"\x0a" + b"\xff" * 12)
    with pytest.raises(BadSessionFile, match="beyond its"):
        list(read_records(path))


def test_another_file_and_another_version_are_refused_with_their_own_messages(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    path.write_text(json.dumps({"session": "s_1"}))
    with pytest.raises(BadSessionFile, match="no session archive"):
        list(read_records(path))
    for version in (VERSION - 1, VERSION + 1):
        path.write_bytes(MAGIC + version.to_bytes(2, "little"))
        with pytest.raises(BadSessionFile, match=f"version {version}; .* reads version {VERSION}"):
            list(read_records(path))


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "s", SOME[:1])

    def fail() -> None:
        with write_archive(path) as writer:
            writer.add(SOME[1])
            raise RuntimeError("no more pages")

    with pytest.raises(RuntimeError):
        fail()
    assert list(read_records(path)) == SOME[:1]
    assert [each.name for each in tmp_path.iterdir()] == ["s"]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(BadSessionFile, match="cannot be written"),
        write_archive(tmp_path / "nowhere" / "s"),
    ):
        pass
